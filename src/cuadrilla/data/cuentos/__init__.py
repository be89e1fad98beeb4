"""`cuentos`: a built-in generator of small Spanish stories that a model of a million parameters can learn in minutes.

`story` writes one, `check` reads one back and names what is wrong, and `minimal_pairs` asks a model which of two
endings is right. Everything is a pure function of a seed and an index, of the standard library alone, and no text comes
from elsewhere: lexicon and grammar are this package's own.

Convention: a model is trained on seed 0 and tested on other seeds. The stories outnumber any training set so far
(`test_distinct_stories_have_a_proven_lower_bound`) that a story of another seed is practically never one that was
trained on (`test_seeds_do_not_share_stories`).

Read `grammar`, then `template` (its notation), `writer`, `checker`, `pairs`.
"""

from __future__ import annotations

from cuadrilla.data.cuentos.checker import Fault, check
from cuadrilla.data.cuentos.pairs import MinimalPair, minimal_pairs
from cuadrilla.data.cuentos.writer import stories, story

__all__ = [
    "Fault",
    "MinimalPair",
    "check",
    "minimal_pairs",
    "stories",
    "story",
]
