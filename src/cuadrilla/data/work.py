"""The job of a preparation that processes share: clean some text.

A pure function: it takes text and gives the content of a `.npz`, so any process of any machine may do it.
"""

import hashlib
import io
import json
from collections import Counter
from dataclasses import dataclass

import numpy as np

from cuadrilla.data import clean, duplicates
from cuadrilla.data.filters import reason_to_drop

RECIPE = 8
"""Raised when the same inputs and options would give other bytes; part of the options in a manifest."""
MIN_CHARACTERS = 20
"""Shorter documents are dropped."""


@dataclass(frozen=True, kw_only=True)
class CleanJob:
    """Some texts, or sections of texts, to be cut into documents."""

    maximum: int
    """Characters of a document."""
    keep_all: bool
    """Drop nothing but what is very short."""
    texts: list[str]
    keep_indentation: list[bool]
    """For each text."""

    def key(self) -> str:
        """A name for the result: that of everything it depends on."""
        digest = hashlib.blake2b(digest_size=16)
        sizes = list(map(len, self.texts))
        digest.update(repr((RECIPE, self.maximum, self.keep_all, self.keep_indentation, sizes)).encode())
        for text in self.texts:
            digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def clean_texts(job: CleanJob) -> bytes:
    """The documents of a job and what is needed to compare them: the content of a `.npz`."""
    counts: Counter[str] = Counter()
    texts: list[str] = []
    of_text: list[int] = []
    for number, (section, keep) in enumerate(zip(job.texts, job.keep_indentation, strict=True)):
        for text in clean.documents(section, keep_indentation=keep, counts=counts, maximum=job.maximum):
            if len(text) < MIN_CHARACTERS:
                counts["documents_too_short"] += 1
            elif not job.keep_all and (reason := reason_to_drop(text)):
                counts[f"filtered_{reason}"] += 1
            else:
                texts.append(text)
                of_text.append(number)
    raws = [text.encode() for text in texts]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        counts=np.frombuffer(json.dumps(counts).encode(), dtype=np.uint8),
        of_text=np.array(of_text, dtype=np.uint32),
        hashes=np.frombuffer(b"".join(map(clean.document_hash, texts)), dtype=">u8").reshape(-1, 2),
        samples=duplicates.samples_of([] if job.keep_all else texts),
        characters=np.fromiter(map(len, texts), dtype=np.uint32),
        sizes=np.fromiter(map(len, raws), dtype=np.uint32),
        text=np.frombuffer(b"".join(raws), dtype=np.uint8),
    )
    return buffer.getvalue()
