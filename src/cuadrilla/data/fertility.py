"""How well a tokenizer fits a text: what a model pays in tokens for the same words."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuadrilla.data.shards import TOKENIZER, Manifest, TokenStream
from cuadrilla.data.tokenizer import Tokenizer

SAMPLE_TOKENS = 2**16
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A word is a run of letters, encoded after a blank, each as often as it occurs."""

    name: str
    vocab_size: int
    bytes_per_token: float
    tokens_per_word: float
    """Fertility."""
    words_split: float
    """Share of words that are more than one token."""
    num_words: int


def fit(tokenizer: Tokenizer, text: str, *, name: str, num_tokens: int | None = None) -> Fit:
    """Measure `tokenizer` on `text`; `num_tokens`: how many it makes of it, if that is known."""
    if num_tokens is None:
        num_tokens = len(tokenizer.encode(text))
    counts = Counter(_WORD.findall(text))
    times = np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
    tokens = np.array([len(ids) for ids in tokenizer.encode_batch([f" {word}" for word in counts])], dtype=np.int64)
    num_words = int(times.sum())
    return Fit(
        name=name,
        vocab_size=tokenizer.vocab_size,
        bytes_per_token=round(len(text.encode()) / max(1, num_tokens), 3),
        tokens_per_word=round(float((times * tokens).sum()) / max(1, num_words), 3),
        words_split=round(float(times[tokens > 1].sum()) / max(1, num_words), 4),
        num_words=num_words,
    )


def fits(folder: Path, manifest: Manifest, others: Sequence[Path]) -> list[Fit]:
    """The tokenizer of a data folder and `others` on the first of its held-out text. Raises DataError."""
    own = Tokenizer.load(folder / TOKENIZER, sha256=manifest.tokenizer_sha256)
    stream = TokenStream.open(folder, "val")
    ids = stream.read(0, min(len(stream), SAMPLE_TOKENS))
    ids = ids[ids != manifest.end_of_text]
    text = own.decode(ids.tolist())
    return [
        fit(own, text, name="this folder's", num_tokens=len(ids)),
        *(fit(Tokenizer.load(path), text, name=str(path)) for path in others),
    ]
