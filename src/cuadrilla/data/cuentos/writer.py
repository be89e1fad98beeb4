"""Derives stories from the grammar, deterministically, and counts how many there must be.

Every choice of story (seed, index) comes from a splitmix64 stream that starts from a blake2b hash of both numbers:
integer arithmetic only, so a story is the same on every machine and Python version (`test_golden_story`).

Invariants: the spans of a derivation are its slots in order, and their text is the text between `start` and `end`
(`test_spans_lie_on_their_text`); `num_distinct_at_least` counts only choices that the text gives away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cuadrilla.data.cuentos.grammar import PLOTS, RULES
from cuadrilla.data.cuentos.lexicon import Bindings, Entry, candidates, num_candidates
from cuadrilla.data.cuentos.template import (
    Adjective,
    Agreement,
    Choice,
    Mention,
    Piece,
    Slot,
    Text,
    compile_template,
    realise,
    variables_of,
)

_MASK = (1 << 64) - 1


class Dice:
    """A splitmix64 stream (Steele, Lea, Flood 2014) started from a hash of its name."""

    def __init__(self, name: str) -> None:
        self._state = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    def below(self, bound: int) -> int:
        """The next number in [0, bound); the bias of the multiply is below bound / 2**64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64


@dataclass(frozen=True, slots=True)
class Span:
    """A slot in the text. `given`: every variable it needs was already called by name before it."""

    start: int
    end: int
    slot: Slot
    given: bool


@dataclass(frozen=True, slots=True)
class Derivation:
    text: str
    spans: tuple[Span, ...]
    bound: Bindings


def derive(index: int, *, seed: int = 0) -> Derivation:
    """Story `index` of a seed with the slots that made it."""
    dice = Dice(f"cuentos:{seed}:{index}")
    pending: list[Piece] = list(reversed(compile_template(PLOTS[dice.below(len(PLOTS))])))
    bound: dict[str, Entry] = {}
    named: set[str] = set()
    texts: list[str] = []
    spans: list[Span] = []
    length = 0
    while pending:
        piece = pending.pop()
        if isinstance(piece, Choice):
            alternatives = RULES[piece.rule]
            pending.extend(reversed(compile_template(alternatives[dice.below(len(alternatives))])))
            continue
        if isinstance(piece, Text):
            text = piece.text
        else:
            names = variables_of(piece)
            for name in names:
                if name not in bound:
                    options = candidates(name, bound)
                    bound[name] = options[dice.below(len(options))]
            text = realise(piece, bound)
            spans.append(Span(length, length + len(text), piece, named.issuperset(names)))
            if not isinstance(piece, Agreement):
                named.update(names)
        texts.append(text)
        length += len(text)
    return Derivation("".join(texts), tuple(spans), bound)


def story(index: int, *, seed: int = 0) -> str:
    """Story `index` of a seed: a few short paragraphs joined by newlines, no newline at the end."""
    return derive(index, seed=seed).text


def stories(count: int, *, start: int = 0, seed: int = 0) -> Iterator[str]:
    """Stories start, start + 1, ... of a seed. Training uses seed 0; tests use other seeds."""
    return (story(index, seed=seed) for index in range(start, start + count))


def num_distinct_at_least() -> int:
    """A proven lower bound on the number of different stories: the largest count of one plot.

    Two derivations of a plot that differ in a counted choice differ in their text. Read both from the left, with equal
    text so far. A counted value: both texts have its reading here, the readings of one variable are different and none
    is the beginning of another, so they differ. A counted alternative: each pair of counted alternatives has the same
    pieces up to a literal text in which they differ letter by letter; the pieces before it either already differ
    in the text or take the same room, so the letters do. Values are counted where they are first read (not where they
    only set a gender), alternatives that fail the condition are left out, and plots are not added up.
    """
    return max(_count(compile_template(plot), frozenset()) for plot in PLOTS)


@cache
def _count(pieces: tuple[Piece, ...], read: frozenset[str]) -> int:
    factor = 1
    for position, piece in enumerate(pieces):
        if isinstance(piece, Choice):
            rest = pieces[position + 1 :]
            return factor * sum(_count(option + rest, read) for option in separable_alternatives(piece.rule))
        if isinstance(piece, Mention | Adjective) and piece.variable not in read:
            factor *= num_candidates(piece.variable)
            read |= {piece.variable}
    return factor


@cache
def separable_alternatives(rule: str) -> tuple[tuple[Piece, ...], ...]:
    """The alternatives of a rule, in order, that differ in literal text from all those kept before."""
    kept: list[tuple[Piece, ...]] = []
    for template in RULES[rule]:
        pieces = compile_template(template)
        if all(_differ_in_text(pieces, other) for other in kept):
            kept.append(pieces)
    return tuple(kept)


def _differ_in_text(left: tuple[Piece, ...], right: tuple[Piece, ...]) -> bool:
    for ours, theirs in zip(left, right, strict=False):
        if ours == theirs:
            continue
        if isinstance(ours, Text) and isinstance(theirs, Text):
            return any(a != b for a, b in zip(ours.text, theirs.text, strict=False))
        return False
    return False
