"""Figures that compare language models with different tokenizers. Each has its sums and an interval.

* Bits per byte of UTF-8. Each document begins after an end-of-text token; each token is predicted once, from the second
  window on with at least half a context before it. End-of-text itself is not predicted, so that only text counts.
* Minimal pairs: how often the allowed text is likelier than the other.

`low` and `high` are a 95 % interval: 1.96 standard errors of a ratio of sums (Cochran, Sampling Techniques, 1977, 6.4)
over windows of a text, or pairs. Neighbouring windows of one text are alike, so that interval is rather too small. Two
models are compared by `difference`, on the same documents or pairs. Texts are cleaned and cut into documents as
`cuadrilla data prepare` does, so that a text gives the same figure here as in a held-out split.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuadrilla.data.corpus import documents_of
from cuadrilla.data.folder import open_tokens, read_manifest
from cuadrilla.data.sources import list_sources
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import NATS_PER_BIT, Pair, log_likelihood, wins

WINDOWS_PER_BATCH = 16
INTERVAL_95 = 1.96  # standard errors
Items = Sequence[tuple[float, int]]


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
    items: Items = ()
    """(part of `total`, part of `count`) of each document or pair, in the order of the test."""

    @property
    def error(self) -> float | None:
        """The standard error."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2 / INTERVAL_95


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much more one model's figure is than another's on the same items, with a 95 % interval."""

    value: float
    low: float
    high: float


def difference(one: Figure, other: Figure) -> Difference | None:
    """`one` minus `other`, item by item; None if they do not share at least two items.

    A hard passage is hard for both models, so this tells more than the two figures' own intervals.
    """
    if [count for _, count in one.items] != [count for _, count in other.items]:
        return None
    items = [(a - b, count) for (a, count), (b, _) in zip(one.items, other.items, strict=True)]
    low, high = _interval(items)
    if low is None or high is None:
        return None
    return Difference(value=math.fsum(part for part, _ in items) / one.count, low=low, high=high)


def _interval(items: Sequence[tuple[float, float]]) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of the sum of the parts over the sum of the counts; (None, None) for a single item."""
    if len(items) < 2:
        return None, None
    parts, counts = np.array(items, dtype=np.float64).T
    ratio = parts.sum() / counts.sum()
    squares = ((parts - ratio * counts) ** 2).sum() * len(items) / (len(items) - 1)
    error = INTERVAL_95 * math.sqrt(squares) / counts.sum()
    return float(ratio - error), float(ratio + error)


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
    sizes: list[int] = []
    document_of: list[int] = []

    def windows() -> Iterator[tuple[list[int], int]]:
        for number, text in enumerate(texts):
            sizes.append(len(text.encode()))
            ids = [tokenizer.end_of_text, *tokenizer.encode(text)]
            for window in cut_windows(ids, context=model.config.context):
                document_of.append(number)
                yield window

    found: list[tuple[float, int]] = []
    batch: list[tuple[list[int], int]] = []
    for window in windows():
        batch.append(window)
        if len(batch) == WINDOWS_PER_BATCH:
            found += _measure(model, tokenizer, batch)
            batch = []
    found += _measure(model, tokenizer, batch) if batch else []
    if not sum(sizes):
        raise DataError("{file} holds no text", file=of, hint="give a file of text")
    by_document = np.bincount(document_of, weights=[value for value, _ in found], minlength=len(sizes)).tolist()
    return _figure("bits_per_byte", tuple(zip(by_document, sizes, strict=True)), of=of, unit="bytes", drawn_from=found)


def _figure(name: str, items: Items, *, of: str, unit: str, drawn_from: Items) -> Figure:
    total, count = math.fsum(part for part, _ in items), sum(size for _, size in items)
    scale = count / sum(size for _, size in drawn_from)  # a character that two windows share counts in both
    low, high = _interval([(part, size * scale) for part, size in drawn_from])
    return Figure(
        name=name, of=of, value=total / count, low=low, high=high, total=total, count=count, unit=unit, items=items
    )


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


def pair_figure(model: GPT2, tokenizer: Tokenizer, pairs: Sequence[Pair], *, of: str) -> Figure:
    """How often the allowed text of a pair is the likelier one; a tie counts half."""
    items = tuple((part, 1) for part in wins(model, tokenizer, pairs))
    return _figure("pairs_right", items, of=of, unit="pairs", drawn_from=items)
