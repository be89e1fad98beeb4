"""Figures that compare language models with different tokenizers. Each has its sums and an interval.

* Bits per byte of UTF-8. Each document begins after an end-of-text token; each token is predicted once, from the second
  window on with at least half a context before it. End-of-text itself is not predicted, so that only text counts.
* Minimal pairs: how often the allowed text is likelier than the other.

`low` and `high` are a 95 % interval: 1.96 standard errors of a ratio of sums (Cochran, Sampling Techniques, 1977, 6.4)
over windows of a text, or pairs. Neighbouring windows of one text are alike, so that interval is rather too small.
Texts are cleaned and cut into documents as `cuadrilla data prepare` does, so that a text gives the same figure here as
in a held-out split.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from cuadrilla.data.corpus import documents_of
from cuadrilla.data.cuentos import MinimalPair
from cuadrilla.data.folder import open_tokens, read_manifest
from cuadrilla.data.sources import list_sources
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import NATS_PER_BIT, log_likelihood, wins

WINDOWS_PER_BATCH = 16
INTERVAL_95 = 1.96  # standard errors


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`value` is `total / count`; `count` counts `unit`s. `low` and `high` are None if there is only one item."""

    name: str
    of: str
    """The file or other data that it was measured on."""
    value: float
    low: float | None
    high: float | None
    total: float
    count: int
    unit: str

    @property
    def error(self) -> float | None:
        """The standard error."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2 / INTERVAL_95


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a file or folder that `cuadrilla data prepare` would read. Raises DataError."""
    return documents_of(list_sources([str(path)], exclude=path / "nothing"))


def held_out_texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """The held-out documents of a data folder, decoded: any model can be measured on them. Raises DataError."""
    end = read_manifest(folder).end_of_text
    document: list[int] = []
    for token in [*open_tokens(folder, "val").tolist(), end]:
        if token != end:
            document.append(token)
        elif document:
            yield tokenizer.decode(document)
            document = []


def text_figure(model: GPT2, tokenizer: Tokenizer, texts: Iterable[str], *, of: str) -> Figure:
    """Bits per byte of some documents. Raises DataError if they are empty."""
    num_bytes = 0

    def windows() -> Iterator[tuple[list[int], int]]:
        nonlocal num_bytes
        for text in texts:
            num_bytes += len(text.encode())
            yield from cut_windows([tokenizer.end_of_text, *tokenizer.encode(text)], context=model.config.context)

    found: list[tuple[float, int]] = []
    left = windows()
    while batch := list(islice(left, WINDOWS_PER_BATCH)):
        found += _measure(model, tokenizer, batch)
    if not num_bytes:
        raise DataError("{file} holds no text", file=of, hint="give a file of text")
    return _figure("bits_per_byte", found, count=num_bytes, of=of, unit="bytes")


def _figure(name: str, items: Sequence[tuple[float, int]], *, count: int, of: str, unit: str) -> Figure:
    """The figure of windows or pairs. `items`: the part of the total and the size of each."""
    total = math.fsum(part for part, _ in items)
    value = total / count
    low, high = None, None
    if len(items) > 1:
        parts, sizes = np.array(items, dtype=np.float64).T
        squares = ((parts - parts.sum() / sizes.sum() * sizes) ** 2).sum() * len(items) / (len(items) - 1)
        error = INTERVAL_95 * math.sqrt(squares) / float(sizes.sum())
        low, high = value - error, value + error
    return Figure(name=name, of=of, value=value, low=low, high=high, total=total, count=count, unit=unit)


def cut_windows(ids: Sequence[int], *, context: int) -> Iterator[tuple[list[int], int]]:
    """Windows of at most `context` + 1 tokens, and how many at the end are new. All but the first are new once."""
    step = max(context // 2, 1)
    done = 1
    while done < len(ids):
        new = min(context if done == 1 else step, len(ids) - done)
        end = done + new
        yield list(ids[max(0, end - context - 1) : end]), new
        done = end


def _measure(model: GPT2, tokenizer: Tokenizer, batch: Sequence[tuple[list[int], int]]) -> list[tuple[float, int]]:
    """Bits of the new tokens of each window, and roughly their number of bytes (a cut character counts in full)."""
    nats = log_likelihood(model, [ids for ids, _ in batch], counted=[new for _, new in batch])
    sizes = [len(tokenizer.decode(ids[-new:]).encode()) for ids, new in batch]
    return [(-value / NATS_PER_BIT, size) for value, size in zip(nats, sizes, strict=True)]


def pair_figure(model: GPT2, tokenizer: Tokenizer, pairs: Sequence[MinimalPair], *, of: str) -> Figure:
    """How often the allowed text of a pair is the likelier one; a tie counts half."""
    items = [(part, 1) for part in wins(model, tokenizer, pairs)]
    return _figure("pairs_right", items, count=len(items), of=of, unit="pairs")
