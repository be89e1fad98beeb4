"""How many different stories of `cuentos` there must be.

Invariant: only choices that the text gives away are counted.
"""

from __future__ import annotations

from functools import cache

from cuadrilla.data.cuentos.grammar import PLOTS, RULES
from cuadrilla.data.cuentos.lexicon import PETS, VARIABLES
from cuadrilla.data.cuentos.template import Adjective, Choice, Mention, Piece, Text, compile_template


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


def num_candidates(variable: str) -> int:
    """How many values `variable` has once what it depends on is bound, whatever that is."""
    return {"f": 2, "k": 1, "n": len(PETS) // 2}.get(variable, len(VARIABLES[variable]))
