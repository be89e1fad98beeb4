"""Each distinct word encoded once: the ids of `tokenizers` at several times its speed, in plain Python.

A byte-level BPE with GPT-2's splitting never merges across the pieces that the splitting makes, so the ids of a text
are those of its pieces. The splitting is written here with explicit classes for Latin text; a document with any other
character (another script, emoji, combining marks) goes through `tokenizers` whole.
"""

import json
import re
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.tokenizer import Tokenizer

MAX_CACHED = 100_000
"""Words remembered: some 20 MB."""

_LETTERS = "A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
_NUMBERS = "0-9\u00b2\u00b3\u00b9\u00bc-\u00be"
_BLANKS = r"\t\n\r \u00a0"
_KNOWN = re.compile(r"[\t\n\r -~\u00a0-\u024f\u2010-\u2027\u2030-\u205e\u20ac\u2122]*")
_PIECE = re.compile(
    rf"'(?:[stmd]|re|ve|ll)| ?[{_LETTERS}]+| ?[{_NUMBERS}]+| ?[^{_BLANKS}{_LETTERS}{_NUMBERS}]+"
    rf"|[{_BLANKS}]+(?![^{_BLANKS}])|[{_BLANKS}]+"
)
_SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def suits(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its pieces, as `_PIECE` makes them."""
    parts = json.loads(tokenizer.json())
    splitting = {key: value for key, value in (parts.get("pre_tokenizer") or {}).items() if key in _SPLITTING}
    return parts["model"].get("type") == "BPE" and parts.get("normalizer") is None and splitting == _SPLITTING


class WordEncoder:
    """Encodes texts with a memory of words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = [token["content"] for token in json.loads(tokenizer.json()).get("added_tokens", ())]
        self._numbers: dict[str, int] = {}
        self._ids: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        """The ids of all words remembered, one word after another."""
        self._ends: NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    def __call__(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        pieces = [self._pieces(text) for text in texts]
        new = list(set(chain.from_iterable(filter(None, pieces))) - self._numbers.keys())
        num_old = len(self._numbers)
        self._numbers.update(zip(new, range(num_old, num_old + len(new)), strict=True))
        encoded = self._tokenizer.encode_batch(new)
        ids = np.concatenate([self._ids, np.fromiter(chain.from_iterable(encoded), dtype=np.uint32)])
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        ends = np.concatenate([self._ends, self._ends[-1] + np.cumsum(lengths)])
        found = []
        for text, some in zip(texts, pieces, strict=True):
            if some is None:
                found.append(np.array(self._tokenizer.encode(text), dtype=np.uint32))
            else:
                words = np.fromiter(map(self._numbers.__getitem__, some), dtype=np.int64, count=len(some))
                found.append(ids[_places(ends[words], ends[words + 1])])
        if len(self._numbers) <= MAX_CACHED:
            self._ids, self._ends = ids, ends
        else:  # the frequent words came first, and stay
            for word in new:
                del self._numbers[word]
        return found

    def _pieces(self, text: str) -> list[str] | None:
        """None: not for us."""
        if not _KNOWN.fullmatch(text) or any(token in text for token in self._added):
            return None
        return _PIECE.findall(text)


def _places(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0] .. ends[0] - 1, starts[1] .. ends[1] - 1, ..."""
    lengths = ends - starts
    stops = np.cumsum(lengths)
    shifts = np.repeat(starts - (stops - lengths), lengths)
    return np.asarray(np.arange(len(shifts)) + shifts)
