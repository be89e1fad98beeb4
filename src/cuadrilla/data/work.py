"""The job of a preparation that processes share: clean some text.

A pure function: it takes text and gives the content of a `.npz`, so any process of any machine may do it.
"""

import io
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from cuadrilla.data import clean, duplicates
from cuadrilla.data.filters import reason_to_drop

RECIPE = 8
"""Raised when the same inputs and options would give other bytes; part of the options in a manifest."""
MIN_CHARACTERS = 20
"""Shorter documents are dropped."""


def clean_texts(texts: Sequence[str], keep_indentation: Sequence[bool], *, maximum: int, keep_all: bool) -> bytes:
    """The documents of some texts, or sections of texts, and what is needed to compare them: the content of a `.npz`.

    `keep_indentation`: for each text; `maximum`: characters of a document; `keep_all`: drop only what is very short.
    """
    counts: Counter[str] = Counter()
    documents: list[str] = []
    of_text: list[int] = []
    for number, (section, keep) in enumerate(zip(texts, keep_indentation, strict=True)):
        for text in clean.documents(section, keep_indentation=keep, counts=counts, maximum=maximum):
            if len(text) < MIN_CHARACTERS:
                counts["documents_too_short"] += 1
            elif not keep_all and (reason := reason_to_drop(text)):
                counts[f"filtered_{reason}"] += 1
            else:
                documents.append(text)
                of_text.append(number)
    raws = [text.encode() for text in documents]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        counts=np.frombuffer(json.dumps(counts).encode(), dtype=np.uint8),
        of_text=np.array(of_text, dtype=np.uint32),
        hashes=np.frombuffer(b"".join(map(clean.document_hash, documents)), dtype=">u8").reshape(-1, 2),
        samples=duplicates.samples_of([] if keep_all else documents),
        characters=np.fromiter(map(len, documents), dtype=np.uint32),
        sizes=np.fromiter(map(len, raws), dtype=np.uint32),
        text=np.frombuffer(b"".join(raws), dtype=np.uint8),
    )
    return buffer.getvalue()
