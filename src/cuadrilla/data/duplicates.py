"""Documents that are the same or nearly so: the first in canonical order stays.

Equal: the 16-byte hashes of `clean.document_hash`. Nearly equal: an estimated Jaccard similarity of their sets of five
words in a row of `DEFAULT_SIMILARITY` or more with a document that is kept (Broder 1997; 14 bands of 8 hashes as in
FineWeb-2: a pair of similarity 0.8 is looked at with probability 0.92, one of 0.6 with 0.21, then all 112 hashes are
compared). A document is compared with the first of each band it shares, and with what stands for that one.

What lies in longer documents, or is cut elsewhere, is the business of `containment.py`.

Words are runs of letters and digits, in lower case, without the accents that editions disagree about. All documents of
a chunk are hashed at once with numpy, so that short ones cost no more for each character than long ones. The hashes are
fixed: the outcome is the same everywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data import containment

NUM_BANDS = 14
BAND_HASHES = 8
NUM_HASHES = NUM_BANDS * BAND_HASHES
SHINGLE_WORDS = 5
DEFAULT_SIMILARITY = 0.8
GROUP_CHARACTERS = 2**17
"""Text hashed at once: its arrays stay in the processor's cache, and below 10 MB."""
NO_SHINGLES = np.uint32(0xFFFFFFFF)
"""All hashes of a document with fewer than five words."""

_random = np.random.Generator(np.random.PCG64(5))
_FACTORS = _random.integers(0, 2**31, NUM_HASHES, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
_ADDENDS = _random.integers(0, 2**32, NUM_HASHES, dtype=np.uint32)
_BAND_FACTORS = _random.integers(0, 2**63, BAND_HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_BASE = 0x2545F4914F6CDD1D
_INVERSE = pow(_BASE, -1, 2**64)
_WORD_FACTORS = tuple(np.uint64(pow(_BASE, 100 + n, 2**64)) for n in range(SHINGLE_WORDS))
_ACCENTS = tuple(
    (accented.encode(), plain.encode()) for accented, plain in zip("áéíóúüàèìòùâêîôû", "aeiouuaeiouaeiou", strict=True)
)
_IS_WORD_BYTE = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])


def word_hashes(raw: bytes) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """A 64-bit hash of each word of UTF-8 text, and where the word begins. Marks of U+0080-U+00BF and U+2000-U+203F,
    the quotes and dashes of Spanish, are no part of words."""
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
    starts, ends = edges[::2], edges[1::2]
    ups, downs = powers(len(data))
    sums = np.zeros(len(data) + 1, dtype=np.uint64)
    np.cumsum(data * ups[: len(data)], out=sums[1:])
    return mixed((sums[ends] - sums[starts]) * downs[starts]), starts


class Sketches(NamedTuple):
    """What is kept of some documents to compare them with others."""

    signatures: NDArray[np.uint32]
    """The least value of each hash over each document: shape (NUM_HASHES, documents)."""
    samples: NDArray[np.uint64]
    """Some of their shingles, as `containment` wants them."""


def sketches(texts: Sequence[str]) -> Sketches:
    """Of each document, whatever its neighbours are."""
    signatures = [np.zeros((NUM_HASHES, 0), dtype=np.uint32)]
    samples = [np.zeros(0, dtype=np.uint64)]
    first = 0
    for group in _groups(texts):
        sketched = _sketches(group)
        signatures.append(sketched.signatures)
        samples.append(sketched.samples + np.uint64(first))
        first += len(group)
    return Sketches(np.concatenate(signatures, axis=1), np.concatenate(samples))


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    length = 0
    for text in texts:
        if group and length + len(text) > GROUP_CHARACTERS:
            yield group
            group, length = [], 0
        group.append(text)
        length += len(text)
    if group:
        yield group


def _folded(text: str) -> bytes:
    raw = text.lower().encode()
    for accented, plain in _ACCENTS:
        raw = raw.replace(accented, plain)
    return raw


def _sketches(texts: Sequence[str]) -> Sketches:
    raws = [_folded(text) for text in texts]
    begins = np.cumsum([0, *(len(raw) + 1 for raw in raws)])[:-1]
    words, starts = word_hashes(b"\0".join(raws))
    of_document = np.searchsorted(begins, starts, side="right") - 1
    found = np.full((NUM_HASHES, len(texts)), NO_SHINGLES)
    count = len(words) - SHINGLE_WORDS + 1
    if count <= 0:
        return Sketches(found, np.zeros(0, dtype=np.uint64))
    shingles = np.zeros(count, dtype=np.uint64)
    for offset, factor in enumerate(_WORD_FACTORS):
        shingles += words[offset : offset + count] * factor
    is_within = of_document[:count] == of_document[SHINGLE_WORDS - 1 :]
    wide = mixed(shingles[is_within])
    hashes = (wide >> np.uint64(32)).astype(np.uint32)
    documents, firsts = np.unique(of_document[:count][is_within], return_index=True)
    values = np.empty_like(hashes)
    if len(hashes):
        for row, factor, addend in zip(found, _FACTORS, _ADDENDS, strict=True):
            np.multiply(hashes, factor, out=values)
            values += addend
            row[documents] = np.minimum.reduceat(values, firsts)
    is_sample = containment.chosen(wide)
    samples = (wide[is_sample] << np.uint64(32)) | of_document[:count][is_within][is_sample].astype(np.uint64)
    return Sketches(found, np.unique(samples))


def band_keys(rows: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """One 64-bit key for each document from the BAND_HASHES rows of a band; 0 for a document without shingles."""
    keys = mixed((rows.astype(np.uint64) * _BAND_FACTORS[:, None]).sum(axis=0, dtype=np.uint64)) | np.uint64(1)
    keys[(rows == NO_SHINGLES).all(axis=0)] = 0
    return np.asarray(keys)


def first_of_equals(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each document the first one with its hash (two halves of it), often itself."""
    order = np.lexsort((low, high))  # stable: equals stay in canonical order
    firsts = np.arange(len(order))
    if len(order):
        begins = (high[order[1:]] != high[order[:-1]]) | (low[order[1:]] != low[order[:-1]])
        places = np.concatenate([[0], np.where(begins, np.arange(1, len(order)), 0)])
        firsts[order] = order[np.maximum.accumulate(places)]
    return firsts


def candidates(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Pairs (document << 32 | an earlier one with the same key, the first); key 0 makes none."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(keys) else np.zeros(0, dtype=bool)
    firsts = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]] if len(keys) else order
    later = ~begins & (ordered != 0)
    pairs: NDArray[np.uint64] = order[later].astype(np.uint64) << np.uint64(32) | firsts[later].astype(np.uint64)
    return pairs


def near_duplicates(
    pairs: NDArray[np.uint64], signature: Callable[[int], NDArray[np.uint32]], *, similarity: float
) -> list[tuple[int, int]]:
    """(document to drop, the kept document it repeats), ascending. `signature`: the hashes of a document."""
    stands_for: dict[int, int] = {}
    for pair in np.unique(pairs).tolist():
        document, other = pair >> 32, pair & 0xFFFFFFFF
        if document in stands_for:
            continue
        kept = stands_for.get(other, other)
        if np.count_nonzero(signature(document) == signature(kept)) >= similarity * NUM_HASHES:
            stands_for[document] = kept
    return sorted(stands_for.items())


_cached: list[NDArray[np.uint64]] = []


def powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """base^0, base^1 ... and those of its inverse, modulo 2^64; kept, since every chunk needs them."""
    if not _cached or len(_cached[0]) < count + 1:
        size = max(count + 1, 2**16)
        _cached[:] = [np.cumprod(np.full(size, base, dtype=np.uint64), dtype=np.uint64) for base in (_BASE, _INVERSE)]
    return _cached[0], _cached[1]


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit depends on every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
