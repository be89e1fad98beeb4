"""How commands talk: data to stdout, everything else to stderr, JSON on request.

What others have written goes through `printable` on its way out: talk and tables always, other data where a person
reads it, on a terminal. A pipe gets it as it is, and JSON stays the same value.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from cuadrilla.errors import CuadrillaError
from cuadrilla.messages import Message, language, shown, translated
from cuadrilla.printable import filled, one_line, printable

MAX_WIDTH = 10_000
NAMES = (
    Message("agreement"), Message("as fast as the best alone"), Message("bits per byte"), Message("bytes"),
    Message("bytes per token"), Message("cause"), Message("character"), Message("cleaning"), Message("default"),
    Message("documents"), Message("encoding"), Message("faults"), Message("file"), Message("held out documents"),
    Message("key"), Message("licence"), Message("loss"), Message("machine"), Message("MB/s at the coordinator"),
    Message("meaning"), Message("measure"), Message("name"), Message("number"), Message("object"), Message("on"),
    Message("origin"), Message("pairs"), Message("pairs right"), Message("parameters"), Message("punctuation"),
    Message("reason"), Message("run"), Message("share"), Message("state"), Message("step"), Message("stories"),
    Message("stories right"), Message("structure"), Message("tokens"), Message("unknown word"), Message("value"),
    Message("version"), Message("waiting"),
)  # fmt: skip
"""Headings of columns, and names of measures and of faults in stories, which tables translate."""


@dataclass
class Options:
    """The global flags, set once by the root command."""

    debug: bool = False
    json: bool = False
    supervised: bool = False
    """This process is the child that coordinates."""
    answers: TextIO | None = None
    """Where a child process gives its answer, if not on what a task would print to."""


class TalkConsole(Console):
    """Falls silent when nobody reads stderr any more; rich's own console would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def tell(self, text: str, *, style: str = "") -> None:
        """Print a message in the person's language, any other text as it is: nothing finds anything in it to obey. A
        terminal that has gone away is no reason to fail."""
        with contextlib.suppress(OSError):
            text = printable(shown(text, language()))
            self.print(Text(filled(text, self.width) if self.is_terminal else text, style=style))


options = Options()
stderr = TalkConsole(stderr=True, highlight=False, soft_wrap=True)


def say(text: str, /, **fields: object) -> None:
    """One line of talk, on stderr: a template, or a message."""
    stderr.tell(Message(text, **fields))


def say_at_once(text: str, /, **fields: object) -> None:
    """A line of our own from a signal's handler, which may have interrupted another line: no lock, no buffer."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{_read(text, fields)}\n".encode())


def _read(text: str, fields: Mapping[str, object]) -> str:
    """As the person at this terminal reads it."""
    return shown(Message(text, **fields), language())


def keep_answer_apart() -> None:
    """In a child process, whose answer is read when it has ended: what a task prints from now on is talk, on stderr."""
    sys.stdout.flush()
    options.answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)


def stdout() -> TextIO:
    """Where data goes. A letter that its encoding lacks (a pipe on Windows, an old locale) is written as its number."""
    if options.answers is not None:
        return options.answers
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


def emit(text: str, /, *, end: str = "\n", **fields: object) -> None:
    """One line of data, or the next part of one, on stdout: a template, or any text."""
    file = stdout()
    text = _read(text, fields)
    print(printable(text) if file.isatty() else text, end=end, file=file, flush=True)


def emit_json(value: Any, *, indent: int | None = 1) -> None:
    file = stdout()
    is_unicode = (file.encoding or "utf-8").lower().startswith("utf")
    print(printable(json.dumps(value, indent=indent, ensure_ascii=not is_unicode, default=str)), file=file, flush=True)


def emit_table(rows: Sequence[Mapping[str, Any]], *, folded: Collection[str] = (), most: int | None = None) -> None:
    """Rows with the same keys: as JSON with `--json`, else as a table that reads without colour, of `most` rows.

    `folded`: the only columns that are broken where the table is too wide for the terminal (none named: all).
    """
    if options.json:
        emit_json(list(rows))
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0] if rows else []:
        table.add_column(Text(named(column)), overflow="fold", no_wrap=bool(folded) and column not in folded)
    for row in rows[:most]:
        table.add_row(*map(_cell, row.values()))
    emit_drawn(table, folds="COLUMNS" in os.environ)
    if more := len(rows[most:]) if most else 0:
        emit("... and {more:,} more (--json shows all)", more=more)


def emit_drawn(drawn: RenderableType, *, folds: bool = False) -> None:
    """A table or several: as wide as the terminal; in pipes and files whole lines, for grep, unless `folds`."""
    console = Console(file=stdout(), highlight=False)
    if (not console.is_terminal or console.is_dumb_terminal) and not folds:
        console.width = MAX_WIDTH
    console.print(drawn)


def named(key: str) -> str:
    """What a column or a measure is called."""
    words = key.replace("_", " ")
    return translated(words, language()) if words in NAMES else _part(key)


def _cell(value: object) -> Text:
    """Not a string: rich would take `[es]` in a file's name for markup, and `:book:` for a picture."""
    match value:
        case None:
            return Text()
        case bool() | str():
            return Text(_part(str(value) if isinstance(value, bool) else value))
        case float():
            return Text(_part(Message("{value:.4g}", value=value)))
    return Text(_part(Message("{value:,}", value=value)))


def report_error(error: CuadrillaError) -> None:
    """`error:` line, blank, `hint:` line; with `--json` also as data. No name in them makes a line of its own."""
    if options.json:  # in English; the template stays the same from one file to another
        made_of = {"template": error.message.template, "fields": error.message.fields}
        emit_json({"error": error.message, "hint": error.hint, "exit_code": error.exit_code, **made_of})
    say("error: {message}", message=_part(error.message))
    if error.hint:
        say("\nhint: {hint}", hint=_part(error.hint))


def _part(text: str) -> str:
    """Part of a line of ours, or of a table, in the person's language."""
    return one_line(shown(text, language()))
