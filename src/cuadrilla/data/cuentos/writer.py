"""Derives stories from the grammar, deterministically.

Every choice in a story comes from a splitmix64 stream that starts from a blake2b hash of its seed and index. Only
integers are computed, so a story is the same on every machine and Python version (`test_golden_story`).

Invariants: the spans of a derivation are its slots in order, and their text is the text between `start` and `end`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from cuadrilla.data.cuentos.grammar import PLOTS, RULES
from cuadrilla.data.cuentos.lexicon import Bindings, Entry, candidates
from cuadrilla.data.cuentos.template import (
    Agreement,
    Choice,
    Piece,
    Slot,
    Text,
    compile_template,
    realise,
    variables_of,
)
from cuadrilla.data.order import GOLDEN, MASK64, mix_int


class Dice:
    """A splitmix64 stream (Steele, Lea, Flood 2014) started from a hash of its name."""

    def __init__(self, name: str) -> None:
        self._state = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    def below(self, bound: int) -> int:
        """The next number in [0, bound). The multiplication's bias is below bound / 2**64."""
        mixed, self._state = mix_int(self._state), (self._state + GOLDEN) & MASK64
        return (mixed * bound) >> 64


@dataclass(frozen=True, slots=True)
class Span:
    """A slot in the text. `given`: the text before it names every variable that the slot needs."""

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
    """Story `index` of a seed, with the slots that it was made from."""
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


def stories(count: int, *, start: int = 0, seed: int = 0) -> Iterator[str]:
    """Stories start, start + 1, ... of a seed: a few short paragraphs each, joined by newlines, no newline at the end.
    Training uses seed 0; tests use other seeds."""
    return (derive(index, seed=seed).text for index in range(start, start + count))
