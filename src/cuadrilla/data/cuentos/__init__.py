"""`cuentos`: a built-in generator of small Spanish stories that a model of a million parameters can learn in minutes.

`stories` writes stories, `fault_of` reads one and names its fault, and `minimal_pairs` gives pairs of endings of which
one is right. A seed and an index decide each result. Only the standard library is used. No text comes from elsewhere:
lexicon and grammar are this package's own.

Convention: a model is trained on seed 0 and tested on other seeds. There are so many more stories than in any training
set that other seeds practically never give a story that was trained
on (`test_seeds_do_not_share_stories`).

Read `grammar`, then `template` (its notation), `writer`, `checker`, `pairs`.
"""

from cuadrilla.data.cuentos.checker import fault_of
from cuadrilla.data.cuentos.pairs import MinimalPair, minimal_pairs
from cuadrilla.data.cuentos.writer import stories

__all__ = ["MinimalPair", "fault_of", "minimal_pairs", "stories"]
