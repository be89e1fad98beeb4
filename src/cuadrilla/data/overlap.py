"""How much of a text that should be new is in the training text, so that a loss on it can be believed.

Both are compared in windows of as many tokens as make about `WINDOW_CHARACTERS` characters (13 tokens at 3.9 bytes
each), at every position inside a document. Of a long held-out text every sixteenth window is looked up, chosen by its
hash. Memory: 17 bytes for each window looked up, and one block of tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.corpus import documents_of
from cuadrilla.data.duplicates import mixed, powers
from cuadrilla.data.shards import TOKENIZER, Manifest, Shard
from cuadrilla.data.sources import list_sources
from cuadrilla.data.tokenizer import Tokenizer

WINDOW_CHARACTERS = 50
MIN_WINDOW_TOKENS = 8
WORTH_A_WARNING = 0.01
FEW_WINDOWS = 2**18
RARITY = 16
BLOCK_TOKENS = 2**20


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Windows of a held-out text, and how many of them occur in the training text."""

    name: str
    checked: int
    found: int

    @property
    def share(self) -> float:
        return self.found / self.checked if self.checked else 0.0


def window_tokens(bytes_per_token: float) -> int:
    return max(MIN_WINDOW_TOKENS, round(WINDOW_CHARACTERS / bytes_per_token))


def measure(
    held_out: Iterable[NDArray[np.int64]],
    train: Iterable[NDArray[np.int64]],
    *,
    name: str,
    width: int,
    end_of_text: int,
) -> Overlap:
    """Look up windows of `width` tokens of `held_out` in `train`. Both come in pieces, a window lies in one of them."""
    kept: list[NDArray[np.uint64]] = []
    rarity = 1
    for tokens in held_out:
        kept.append(_some(_windows(tokens, width=width, end_of_text=end_of_text), rarity))
        if rarity == 1 and sum(map(len, kept)) > FEW_WINDOWS:
            rarity = RARITY
            kept = [_some(some, rarity) for some in kept]
    wanted, times = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *kept]), return_counts=True)
    is_found = np.zeros(len(wanted), dtype=bool)
    for tokens in train if len(wanted) else ():
        hashes = _some(_windows(tokens, width=width, end_of_text=end_of_text), rarity)
        places = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        is_found[places[wanted[places] == hashes]] = True
    return Overlap(name=name, checked=int(times.sum()), found=int(times[is_found].sum()))


def blocks(folder: Path, shards: Sequence[Shard], *, dtype: str, overlap: int) -> Iterator[NDArray[np.int64]]:
    """The tokens of some shards; each block begins with the last `overlap` of the one before.

    Read and not mapped: pages of a mapped file would count as our memory.
    """
    little = np.dtype(dtype).newbyteorder("<")
    tail = np.zeros(0, dtype=np.int64)
    for shard in shards:
        for start in range(0, shard.num_tokens, BLOCK_TOKENS):
            read = np.fromfile(folder / shard.name, dtype=little, count=BLOCK_TOKENS, offset=start * little.itemsize)
            block = np.concatenate([tail, read])
            yield block
            tail = block[-overlap:]


def of_files(folder: Path, manifest: Manifest, specs: Sequence[str]) -> Iterator[Overlap]:
    """The overlap of each file of `specs` with the training text of a data folder. Raises DataError."""
    tokenizer = Tokenizer.load(folder / TOKENIZER, sha256=manifest.tokenizer_sha256)
    split = manifest.splits["train"]
    width = window_tokens(split.num_bytes / max(1, split.num_tokens))

    sources = list_sources(specs, exclude=folder)
    for place, texts in groupby(documents_of(sources), key=itemgetter(0)):
        ids = (np.array(tokenizer.encode(text), dtype=np.int64) for _, text in texts)
        train = blocks(folder, split.shards, dtype=manifest.dtype, overlap=width - 1)
        name = sources.all[place].name
        yield measure(ids, train, name=name, width=width, end_of_text=manifest.end_of_text)


def _windows(tokens: NDArray[np.int64], *, width: int, end_of_text: int) -> NDArray[np.uint64]:
    """A hash of each `width` neighbours of one document."""
    count = len(tokens) - width + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    ups, downs = powers(len(tokens))
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum(tokens.astype(np.uint64) * ups[: len(tokens)], out=sums[1:])
    ends = np.concatenate([[0], np.cumsum(tokens == end_of_text)])
    is_within = ends[width:] == ends[:-width]
    return mixed(((sums[width:] - sums[:-width]) * downs[:count])[is_within])


def _some(hashes: NDArray[np.uint64], rarity: int) -> NDArray[np.uint64]:
    return hashes[hashes % np.uint64(rarity) == 0] if rarity > 1 else hashes
