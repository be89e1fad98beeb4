"""Find documents that earlier documents contain: copies, changed copies, other editions of a book, chapters of it.

Equal documents have the same 16-byte hash (`clean.document_hash`). Others are compared by their shingles: five words in
a row. A document is dropped if kept documents before it contain `SIMILARITY` of its shingles, in whatever places. Only
one shingle in `SAMPLING` is compared; its hash decides, so the choice is the same in every document (FracMinHash: Irber
et al. 2022, doi 10.1101/2022.01.11.475838). Documents with fewer than `MIN_SAMPLES` of them are kept.

Words are runs of letters and digits, in lower case, without the accents in which editions differ. The hashes are fixed,
so the result is the same everywhere.

A sample is one number: 32 bits of a shingle's hash, then 32 bits for the number of its document. In sorted samples,
equal hashes are neighbours, in the order of their documents.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.order import mixed

SHINGLE_WORDS = 5
SIMILARITY = 0.8
SAMPLING = 8
MIN_SAMPLES = 16
"""About 800 characters. With this number of samples, an estimate of 80 % is within 20 % of the truth."""
MAX_CHARACTERS = 2 * 10**8
"""Comparing this many takes a quarter of a GiB of memory. Of a larger corpus fewer samples are compared."""

GROUP_DOCUMENTS = 8
"""Documents that are hashed at once, so few that their arrays stay in the processor's cache."""

_BASE = 0x2545F4914F6CDD1D
_WORD_FACTORS = tuple(np.uint64(pow(_BASE, 100 + n, 2**64)) for n in range(SHINGLE_WORDS))
_ACCENTS = tuple(
    (accented.encode(), plain.encode()) for accented, plain in zip("áéíóúüàèìòùâêîôû", "aeiouuaeiouaeiou", strict=True)
)
_IS_WORD_BYTE = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])
_DOCUMENT_BITS = np.uint64(32)
_DOCUMENT = np.uint64(0xFFFFFFFF)


def samples_of(texts: Sequence[str]) -> NDArray[np.uint64]:
    """The samples of some documents, which are numbered from 0. They do not depend on neighbouring documents."""
    groups = range(0, len(texts), GROUP_DOCUMENTS)
    found = [_samples_of(texts[first : first + GROUP_DOCUMENTS]) + np.uint64(first) for first in groups]
    return np.concatenate([np.zeros(0, dtype=np.uint64), *found])


def _samples_of(texts: Sequence[str]) -> NDArray[np.uint64]:
    raws = [_folded(text) for text in texts]
    begins = np.cumsum([0, *(len(raw) + 1 for raw in raws)])[:-1]
    words, starts = word_hashes(b"\0".join(raws))
    count = len(words) - SHINGLE_WORDS + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    shingles = np.zeros(count, dtype=np.uint64)
    for offset, factor in enumerate(_WORD_FACTORS):
        shingles += words[offset : offset + count] * factor
    hashes = mixed(shingles)
    chosen = np.flatnonzero(hashes < np.uint64(2**64 // SAMPLING))
    first, last = (np.searchsorted(begins, starts[chosen + add], side="right") for add in (0, SHINGLE_WORDS - 1))
    inside = first == last
    return np.asarray((hashes[chosen][inside] << _DOCUMENT_BITS) | (first[inside] - 1).astype(np.uint64))


def word_hashes(raw: bytes) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """A 64-bit hash of each word of UTF-8 text, and the byte where the word begins. Marks of U+0080-U+00BF and
    U+2000-U+203F, such as Spanish quotes and dashes, are not part of words."""
    data = np.frombuffer(raw, dtype=np.uint8)
    inside = np.zeros(len(data) + 2, dtype=bool)
    body = inside[1:-1]
    np.take(_IS_WORD_BYTE, data, out=body)
    latin = np.flatnonzero(data[:-1] == 0xC2)
    body[latin] = body[latin + 1] = False
    general = np.flatnonzero((data[:-2] == 0xE2) & (data[1:-1] == 0x80))
    for offset in range(3):
        body[general + offset] = False
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts):
        return np.zeros(0, dtype=np.uint64), starts
    begins = np.cumsum(lengths) - lengths
    letters = data[body]
    places = np.arange(len(letters)) - np.repeat(begins, lengths)
    powers = np.cumprod(np.full(lengths.max(), _BASE, dtype=np.uint64), dtype=np.uint64)
    return mixed(np.add.reduceat(letters * powers[places], begins)), starts


def _folded(text: str) -> bytes:
    raw = text.lower().encode()
    for accented, plain in _ACCENTS:
        raw = raw.replace(accented, plain)
    return raw


def thinned(samples: NDArray[np.uint64], *, num_characters: int) -> NDArray[np.uint64]:
    """The samples to compare in a corpus of this size. Hashes decide, so the choice is the same in every text."""
    halvings = max(0, math.ceil(math.log2(max(1, num_characters) / MAX_CHARACTERS)))
    return np.asarray(samples[(samples >> _DOCUMENT_BITS) % np.uint64(2**halvings) == 0])


def find_contained(samples: NDArray[np.uint64], *, num_documents: int) -> list[int]:
    """The documents to drop, ascending: kept documents before them have at least `SIMILARITY` of their samples."""
    samples = np.unique(samples)
    of_document = (samples & _DOCUMENT).astype(np.uint32)
    is_new = np.ones(len(samples), dtype=np.bool_)
    is_new[1:] = (samples[1:] ^ samples[:-1]) > _DOCUMENT
    begins = np.flatnonzero(is_new)
    sizes = np.diff(begins, append=len(samples))
    is_seen = of_document != np.repeat(of_document[begins], sizes)
    totals = np.bincount(of_document, minlength=num_documents)
    seen = np.bincount(of_document[is_seen], minlength=num_documents)
    is_doubtful = (totals >= MIN_SAMPLES) & (seen >= SIMILARITY * totals)
    if not is_doubtful.any():
        return []
    kept = np.where(is_doubtful[of_document], np.uint32(num_documents), of_document)
    first_kept = np.minimum.reduceat(kept, begins).astype(np.int64)
    groups = np.repeat(np.arange(len(begins), dtype=np.uint32), sizes)
    rows = np.flatnonzero(is_doubtful[of_document])
    rows = rows[np.argsort(of_document[rows], kind="stable")]
    doubtful, starts = np.unique(of_document[rows].astype(np.int64), return_index=True)
    found = []
    for document, mine in zip(doubtful.tolist(), np.split(groups[rows], starts[1:]), strict=True):
        if np.count_nonzero(first_kept[mine] < document) >= SIMILARITY * len(mine):
            found.append(document)
        else:
            first_kept[mine] = np.minimum(first_kept[mine], document)
    return found
