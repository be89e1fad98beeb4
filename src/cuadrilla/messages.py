"""Texts for users: templates with fields, in English in the code and in other languages in catalogues.

    raise DataError("{path} has no text", path=path, hint="name another file")

A `Message` is the English text, a `str`, and keeps its template and fields. Code that shows it to a person calls
`in_language(language())`. The catalogues are GNU gettext's: `locale/LANGUAGE/LC_MESSAGES/cuadrilla.po`, kept up to date
by `tools/messages.py --update`. They are compiled when cuadrilla is installed, or by `make`.

Invariant: a template is a literal of our own code. Text from outside is the value of a field and is never formatted.
"""

import gettext
import os
import re
import string
from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

ENGLISH, SPANISH = "en", "es"
LANGUAGES = (ENGLISH, SPANISH)
VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
"""Environment variables with the user's languages, in the order in which GNU gettext reads them."""
LOCALE = Path(__file__).parent / "locale"

Field = str | int | float | None


class Message(str):
    """The English text of a `template` with a `{name}` for each of the `fields`. Values are kept as text or numbers."""

    __slots__ = ("fields", "template")
    template: str
    fields: Mapping[str, Field]

    def __new__(cls, template: str, /, **fields: object) -> "Message":
        if isinstance(template, Message):
            return template
        kept = {name: _plain(value) for name, value in fields.items()}
        text = super().__new__(cls, string.Formatter().vformat(template, (), kept) if kept else template)
        text.template, text.fields = str(template), kept
        return text

    def in_language(self, language: str) -> str:
        """The text in this language; in English if the catalogue lacks it."""
        if not self.fields:
            return recognised(self.template, language)
        template = translated(self.template, language)
        fields = {
            name: shown(value, language) if isinstance(value, str) else value for name, value in self.fields.items()
        }
        return _FORMATTERS[language].vformat(template, (), fields)


class _SpanishNumbers(string.Formatter):
    """Writes 12.345,6 for 12,345.6. A number without grouping or fixed decimals stays as a run file has it."""

    def format_field(self, value: Any, format_spec: str) -> str:
        text = str(super().format_field(value, format_spec))
        if isinstance(value, int | float) and ("," in format_spec or format_spec.endswith(("f", "%"))):
            return text.translate(_SWAPPED)
        return text


OF_THE_SYSTEM = (
    "No such file or directory", "Permission denied", "Operation not permitted", "Is a directory", "Not a directory",
    "File exists", "File name too long", "No space left on device", "Read-only file system", "Input/output error",
    "Too many open files", "Address already in use", "Connection refused", "Connection reset by peer",
    "Connection timed out", "No route to host", "Network is unreachable",
)  # fmt: skip
"""The most frequent values of `OSError.strerror`. They arrive as plain `str`; `tools/messages.py` reads them here."""
THAT_TRAVEL = (
    "step {step}: {why} (loss {loss:.4g})", "from step {step} on: {how}", "step {step} reached",
    "each machine makes {steps} steps by itself before a merge, because over this network that is faster",
    "held-out loss was lowest at step {step}, {evaluations} evaluations ago (evaluate.patience)",
    "the run was stopped by {what}", "lost: nothing heard for {seconds:.1f} s", "hung: no progress for {seconds:.1f} s",
    "{error} (exit code {code})", "the coordinator refused: {reason}", "{address} cannot be reached: {reason}",
    "signal {number} ({name}): was there enough memory?", "signal {number} ({name})", "exit code {code}",
    "excluded: its contributions were unusable in {rounds} rounds; to let it in again, restart the coordinator "
    "(cuadrilla stop, then cuadrilla up RUN)", "it sent a message that cannot be handled ({kind})",
    "cannot write {where}: {reason}", "out of memory with %d sequences in a pass: from now on %d",
    "a contribution of %s is computed again: %s (units %s)", "%s; training goes on, the last checkpoint is step %d",
    "%s; trying again until it answers", "out of the crew for now: %s", "waiting: %s", "%s joined", "%s left: %s",
    "%s has left the crew; with an invite it may come back", "no worker of this machine is left (%s): others can join",
    "a worker for each of %s", "job %s: %s", "job %s", "%s died: %s", "%s: %s",
)  # fmt: skip
"""Templates of texts that travel in English, in files and to other machines. Translations keep the fields' order."""
_FIELD = re.compile(r"%[sd]|\{\w+(?::[^}]*)?\}")
_SWAPPED = str.maketrans(",.", ".,")
_FORMATTERS = {ENGLISH: string.Formatter(), SPANISH: _SpanishNumbers()}


def shown(text: str, language: str) -> str:
    """The text for a person: messages and frequent system errors are translated, other texts stay as they are."""
    if isinstance(text, Message):
        return text.in_language(language)
    return translated(text, language) if text in OF_THE_SYSTEM else text


def translated(template: str, language: str) -> str:
    """The template in this language; the English one if the catalogue lacks it."""
    return catalogue(language).gettext(template) if template else ""  # gettext translates "" to the catalogue's header


@lru_cache(2**12)  # the same texts are shown again every second
def recognised(text: str, language: str, depth: int = 4) -> str:
    """A text from a file or another machine in this language, if it is a template, or one of `THAT_TRAVEL` filled in;
    what stood in the fields is recognised, too, to this depth. Other texts stay as they are."""
    whole = translated(text, language)
    for template in THAT_TRAVEL if depth and whole == text and language != ENGLISH else ():
        if match := re.fullmatch("(.+?)".join(map(re.escape, _FIELD.split(template))), text):
            values = [recognised(value, language, depth - 1) for value in match.groups()]
            return "".join(chain(*zip_longest(_FIELD.split(translated(template, language)), values, fillvalue="")))
    return whole


def language(environment: Mapping[str, str] = os.environ, *, otherwise: str = "") -> str:
    """The first available language of the user's variables, then of `otherwise` (a browser's header); else English."""
    said = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    codes = (word.strip()[:2].lower() for word in f"{said}:{otherwise}".replace(",", ":").split(":"))
    return next((code for code in codes if code in LANGUAGES), ENGLISH)


@cache
def catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation("cuadrilla", LOCALE, [language], fallback=language == ENGLISH)


def _plain(value: object) -> Field:
    """The value as a number or text of Python; numbers of NumPy and torch are converted, too."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, str | int | float | None) and not isinstance(value, bool) else str(value)
