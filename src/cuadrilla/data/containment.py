"""Documents whose text lies in earlier ones, wherever those begin and end: other editions of a book, chapters of it.

A document's share in others is that of its sets of five words in a row (`duplicates.py`) which occur in a kept document
before it. One set in `SAMPLING` is looked at, chosen by its hash, the same in every document (FracMinHash: Irber et al.
2022, doi 10.1101/2022.01.11.475838); documents with fewer than `MIN_SAMPLES` are left to their signatures.

A sample is one number: 32 bits of its hash above 32 bits of its document. Sorted, equal hashes lie side by side in the
order of their documents.
"""

import numpy as np
from numpy.typing import NDArray

SAMPLING = 32
MIN_SAMPLES = 16
"""Some 3,000 characters: with this number of samples an estimate of 80 % is within 20 % of the truth."""
MAX_SAMPLES = 2**22
"""Of some 0.8 GB of text; comparing them takes a quarter of a gibibyte (55 bytes each, by tracemalloc). Of more text a
smaller part is looked at."""

_DOCUMENT_BITS = np.uint64(32)
_DOCUMENT = np.uint64(0xFFFFFFFF)


def chosen(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which shingles are looked at, by their 64-bit hash."""
    return np.asarray(hashes < np.uint64(2**64 // SAMPLING))


def thinned(samples: NDArray[np.uint64], *, halvings: int) -> NDArray[np.uint64]:
    """The samples that are left when half of them is dropped so often, the same halves of every text."""
    return np.asarray(samples[(samples >> _DOCUMENT_BITS) % np.uint64(2**halvings) == 0])


def find_contained(samples: NDArray[np.uint64], *, num_documents: int, share: float) -> list[tuple[int, int]]:
    """(document to drop, the kept one that has most of it), ascending: `share` of it is in kept ones before it."""
    samples = np.unique(samples)
    of_document = (samples & _DOCUMENT).astype(np.uint32)
    is_new = np.ones(len(samples), dtype=np.bool_)
    is_new[1:] = (samples[1:] ^ samples[:-1]) > _DOCUMENT
    begins = np.flatnonzero(is_new)
    sizes = np.diff(begins, append=len(samples))
    is_seen = of_document != np.repeat(of_document[begins], sizes)
    totals = np.bincount(of_document, minlength=num_documents)
    seen = np.bincount(of_document[is_seen], minlength=num_documents)
    is_doubtful = (totals >= MIN_SAMPLES) & (seen >= share * totals)
    if not is_doubtful.any():
        return []
    kept = np.where(is_doubtful[of_document], np.uint32(num_documents), of_document)
    first_kept = np.minimum.reduceat(kept, begins).astype(np.int64)
    groups = np.repeat(np.arange(len(begins), dtype=np.uint32), sizes)
    rows = np.flatnonzero(is_doubtful[of_document])
    rows = rows[np.argsort(of_document[rows], kind="stable")]
    doubtful, starts = np.unique(of_document[rows].astype(np.int64), return_index=True)
    found: list[tuple[int, int]] = []
    for document, mine in zip(doubtful.tolist(), np.split(groups[rows], starts[1:]), strict=True):
        holders = first_kept[mine]
        earlier = holders[holders < document]
        if len(earlier) >= share * len(mine):
            others, counts = np.unique(earlier, return_counts=True)
            found.append((document, int(others[np.argmax(counts)])))
        else:
            first_kept[mine] = np.minimum(holders, document)
    return found
