"""The two jobs of a preparation: clean some text, encode some documents.

Both are pure functions: they take bytes and give the bytes of a chunk (`chunks.py`), so any process of any machine may
do them (`executor.py`). A file that a job reads is given as its path where the worker shares this machine's disk, else
as its bytes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data import clean, duplicates
from cuadrilla.data.chunks import Chunk, chunk_bytes
from cuadrilla.data.filters import BOOKS, reason_to_drop
from cuadrilla.data.tokenizer import Tokenizer

MIN_CHARACTERS = 20
"""Shorter documents are dropped."""
SAMPLES_PER_REASON = 3
SAMPLE_CHARACTERS = 300
DROP, TRAIN, VAL = 0, 1, 2

File = Path | bytes
"""A file by its path, or its content."""


@dataclass(frozen=True, kw_only=True)
class CleanJob:
    """Clean some texts (or sections of texts), given as UTF-8 one after another."""

    maximum: int
    filter: str
    near: bool
    """Compute signatures for near-duplicates."""
    keep_indentation: list[bool]
    """Of each text."""
    sizes: list[int]
    """Bytes of each text."""


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Encode the documents of a chunk."""

    splits: bytes
    """A byte for each document: DROP, TRAIN or VAL."""
    held_out: bytes
    """Hashes of the paragraphs to leave out of TRAIN, 8 bytes each."""
    tokenizer_sha256: str
    dtype: str


def texts_of(chunk: Chunk) -> Iterator[str]:
    """The documents of a cleaned chunk."""
    raw = chunk.array("text").tobytes()
    position = 0
    for size in chunk.array("sizes").tolist():
        yield raw[position : position + size].decode()
        position += size


class _Cleaned:
    """The documents of one chunk while they come in."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.of_text: list[int] = []
        self.counts: Counter[str] = Counter()
        self.dropped: list[dict[str, Any]] = []
        self._num_dropped: Counter[str] = Counter()

    def drop(self, reason: str, text: str, of_text: int) -> None:
        self.counts[reason] += 1
        if self.counts[reason] <= SAMPLES_PER_REASON:
            shown = " ".join(text[: 2 * SAMPLE_CHARACTERS].split())[:SAMPLE_CHARACTERS]
            self.dropped.append({"reason": reason, "text": of_text, "characters": len(text), "begins": shown})

    def chunk(self, job: CleanJob) -> bytes:
        paragraphs = [(number, key) for number, text in enumerate(self.texts) for key, _ in clean.long_paragraphs(text)]
        raws = [text.encode() for text in self.texts]
        sketches = duplicates.sketches(self.texts if job.near else [])
        arrays: dict[str, NDArray[Any]] = {
            "of_text": np.array(self.of_text, dtype=np.uint32),
            "hashes": np.frombuffer(b"".join(map(clean.document_hash, self.texts)), dtype=">u8").reshape(-1, 2),
            "characters": np.fromiter(map(len, self.texts), dtype=np.uint32),
            "sizes": np.fromiter(map(len, raws), dtype=np.uint32),
            "paragraph_of": np.array([number for number, _ in paragraphs], dtype=np.uint32),
            "paragraphs": np.array([key for _, key in paragraphs], dtype=np.uint64),
            **{f"band{n}": band for n, band in enumerate(np.split(sketches.signatures, duplicates.NUM_BANDS))},
            "samples": sketches.samples,
            "text": np.frombuffer(b"".join(raws), dtype=np.uint8),
        }
        return chunk_bytes({"counts": self.counts, "dropped": self.dropped}, arrays)


def clean_texts(job: CleanJob, payload: bytes) -> bytes:
    """A chunk of the documents in `payload`, the UTF-8 texts one after another."""
    cleaned = _Cleaned()
    position = 0
    for number, (size, keep) in enumerate(zip(job.sizes, job.keep_indentation, strict=True)):
        section = payload[position : position + size].decode("utf-8", "surrogatepass")
        position += size
        for text in clean.documents(section, keep_indentation=keep, counts=cleaned.counts, maximum=job.maximum):
            if len(text) < MIN_CHARACTERS:
                cleaned.drop("documents_too_short", text, number)
            elif job.filter == BOOKS and (reason := reason_to_drop(text)):
                cleaned.drop(f"filtered_{reason}", text, number)
            else:
                cleaned.texts.append(text)
                cleaned.of_text.append(number)
    return cleaned.chunk(job)


@lru_cache(maxsize=1)
def _tokenizer(sha256: str, file: File) -> Tokenizer:
    """Made once in each process: loading a tokenizer takes longer than a chunk."""
    return Tokenizer(file) if isinstance(file, bytes) else Tokenizer.load(file, sha256=sha256)


def encode_documents(job: EncodeJob, chunk: File, tokenizer_file: File) -> bytes:
    """A chunk of the token ids of each document that is kept, an end-of-text id behind each."""
    tokenizer = _tokenizer(job.tokenizer_sha256, tokenizer_file)
    held_out = set(np.frombuffer(job.held_out, dtype=np.uint64).tolist())
    texts, documents = [], []
    num_removed = 0
    for number, (split, text) in enumerate(zip(job.splits, texts_of(Chunk(chunk)), strict=True)):
        kept = text
        if split == DROP:
            continue
        if split == TRAIN and held_out:
            kept, removed = clean.without_paragraphs(text, held_out)
            num_removed += removed
        if kept.strip():
            texts.append(kept)
            documents.append(number)
    encoded = tokenizer.encode_batch(texts)
    lengths = np.fromiter(map(len, encoded), dtype=np.uint32, count=len(encoded))
    ids = np.fromiter(chain.from_iterable(encoded), dtype=job.dtype, count=int(lengths.sum()))
    arrays: dict[str, NDArray[Any]] = {
        "documents": np.array(documents, dtype=np.uint32),
        "characters": np.fromiter(map(len, texts), dtype=np.uint32),
        "sizes": np.fromiter((len(text.encode()) for text in texts), dtype=np.uint32),
        "lengths": lengths + np.uint32(1),
        "ids": np.insert(ids, np.cumsum(lengths, dtype=np.int64), tokenizer.end_of_text),
    }
    return chunk_bytes({"removed": num_removed}, arrays)
