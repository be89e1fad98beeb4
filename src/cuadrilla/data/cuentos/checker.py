"""Reads a text as a story of `cuentos` and says what kind of fault it has.

The checker is a backtracking parser of the generator's grammar. A variable is bound where it is first read; an article
already limits it to one gender. Every later slot must agree with that binding: names, the toy and its colour, articles,
adjectives, clitics, the effect of the cause, the fruit of the tree. A text passes if some plot derives all of it, white
space and punctuation included; blank space around it is ignored.

Invariants: no story has a fault (`test_checker_accepts_every_generated_story`); a story with one planted error has one
(`test_checker_rejects_planted_errors`). The kind of fault is only the likely one: it follows from the farthest place
that any reading reached.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cuadrilla.data.cuentos.grammar import PLOTS, RULES
from cuadrilla.data.cuentos.lexicon import MENTION_KINDS, VARIABLES, Bindings, candidates
from cuadrilla.data.cuentos.template import (
    Adjective,
    Agreement,
    Choice,
    Mention,
    Piece,
    Text,
    compile_template,
    form_index,
    realise,
    variables_of,
)

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class _Failure:
    start: int
    expected: str
    piece: Text | Mention | Agreement | Adjective
    bound: Bindings


_Pending = tuple[Piece, "_Pending"] | None


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.farthest = -1
        self.failures: list[_Failure] = []

    def read(self, pending: _Pending, position: int, bound: Bindings) -> bool:
        """Whether the pending pieces derive exactly the text from `position` on."""
        while pending is not None:
            piece, rest = pending
            if isinstance(piece, Choice):
                options = (compile_template(template) for template in RULES[piece.rule])
                return any(self.read(_push(option, rest), position, bound) for option in options)
            if isinstance(piece, Text):
                expected = piece.text
            else:
                unbound = next((name for name in variables_of(piece) if name not in bound), None)
                if unbound is not None:
                    entries = candidates(unbound, bound)
                    return any(self.read(pending, position, {**bound, unbound: entry}) for entry in entries)
                expected = realise(piece, bound)
            if not self.text.startswith(expected, position):
                self._fail(_Failure(position, expected, piece, bound))
                return False
            position += len(expected)
            pending = rest
        if position < len(self.text):
            self._fail(_Failure(position, "", Text(""), bound))
        return position == len(self.text)

    def _fail(self, failure: _Failure) -> None:
        """Keep the failures in the farthest word that any reading has reached."""
        pairs = zip(failure.expected, self.text[failure.start :], strict=False)
        reached = failure.start + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        while reached > failure.start and self.text[reached - 1 : reached].isalnum():
            reached -= 1
        if reached > self.farthest:
            self.farthest, self.failures = reached, []
        if reached == self.farthest:
            self.failures.append(failure)


def _push(pieces: tuple[Piece, ...], rest: _Pending) -> _Pending:
    for piece in reversed(pieces):
        rest = (piece, rest)
    return rest


def fault_of(text: str) -> str | None:
    """The kind of the first fault of `text` as a story: agreement, character, object, cause, unknown word, punctuation
    or structure. None if it is right."""
    text = text.strip()
    if any(word not in known_words() for word in _WORD.findall(text)):
        return "unknown word"
    reader = _Reader(text)
    if any(reader.read(_push(compile_template(plot), None), 0, {}) for plot in PLOTS):
        return None
    return _diagnose(reader)


def _diagnose(reader: _Reader) -> str:
    text, place = reader.text, reader.farthest
    rest = text[place:].partition("\n")[0]
    if not rest:
        return "structure"  # the text stops before the story ends, or a line is missing
    num_readings = len({failure.expected for failure in reader.failures})
    for failure in reader.failures:
        inside = place > failure.start and isinstance(failure.piece, Agreement)
        kind = "agreement" if inside else _kind_of_slot(failure, text, several=num_readings > 1)
        if kind is not None:
            return kind
    marks = not rest[0].isalnum() or any(not f.expected[place - f.start :][:1].isalnum() for f in reader.failures)
    return "punctuation" if marks else "structure"


def _kind_of_slot(failure: _Failure, text: str, *, several: bool) -> str | None:
    """The kind of fault if the text has another form or value of the slot at this place, else None."""

    def here(other: str) -> bool:
        end = failure.start + len(other)
        return other != failure.expected and text.startswith(other, failure.start) and not text[end : end + 1].isalnum()

    match failure.piece:
        case Agreement(forms=forms):
            return "agreement" if any(here(form) for form in forms) else None
        case Adjective(variable=variable):
            if any(here(form) for form in failure.bound[variable].forms or ()):
                return "agreement"
            return "object" if any(here(form) for entry in VARIABLES[variable] for form in entry.forms or ()) else None
        case Mention(variable=variable, part=part):
            ours = failure.bound[variable]
            for entry in VARIABLES[variable]:
                if here(realise(Mention(variable, part), {**failure.bound, variable: entry})):
                    agrees = (entry.gender, entry.plural) == (ours.gender, ours.plural)
                    return MENTION_KINDS.get(variable, "structure") if agrees or not several else "agreement"
    return None


@cache
def known_words() -> frozenset[str]:
    """Every word form, capitalised or not, that occurs in some story."""
    texts = (text for template in (*PLOTS, *(t for rule in RULES.values() for t in rule)) for text in _texts(template))
    return frozenset(word for text in texts for word in _WORD.findall(text))


def _form_indices(variables: tuple[str, ...]) -> set[int]:
    """Indices of all forms that values of the variables may need."""
    return {form_index(entries) for entries in itertools.product(*(VARIABLES[name] for name in variables))}


def _texts(template: str) -> Iterator[str]:
    for piece in compile_template(template):
        match piece:
            case Text(text=text):
                yield text
            case Agreement(variables=variables, forms=forms):
                yield from (forms[index] for index in _form_indices(variables))
            case Adjective(variable=variable, noun=noun):
                indices = _form_indices((noun,))
                yield from (entry.forms[index] for entry in VARIABLES[variable] if entry.forms for index in indices)
            case Mention(variable=variable, part=part):
                for entry in VARIABLES[variable]:
                    yield from _texts(entry.parts[part])
