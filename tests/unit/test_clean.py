"""Cleaning, cutting and splitting: pure functions of text."""

from collections import Counter

import pytest

from cuadrilla.data import clean

pytestmark = pytest.mark.unit


def run(*pieces, keep_indentation=False, maximum=clean.MAX_DOCUMENT):
    counts = Counter()
    texts = [
        text
        for section in clean.sections(pieces, counts)
        for text in clean.documents(section, keep_indentation=keep_indentation, counts=counts, maximum=maximum)
    ]
    return texts, {name: count for name, count in counts.items() if count}


def book(chapters=40, words=60):
    """Paragraphs of about 400 characters that are all different."""
    return "\n\n".join(" ".join(f"palabra{c}x{w}" for w in range(words)) for c in range(chapters))
