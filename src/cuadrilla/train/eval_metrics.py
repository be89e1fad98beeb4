"""Figures that compare language models, whatever their tokenizers: each with its sums and how uncertain it is.

* Bits per byte of UTF-8. Each document begins after an end-of-text token; each token is predicted once, from the second
  window on with at least half a context before it. End-of-text itself is not predicted, so that only text counts.
* Minimal pairs: how often the allowed text is likelier than the other.

`error` is a standard error: over windows for bits per byte (the ratio's linearisation; neighbouring windows of one text
are alike, so it is rather too small), over items for shares. `low` and `high` are a 95 % interval: Wilson's for shares
of right answers, which holds at 0 and 1 too. Two models are compared by `difference`, on the same documents or pairs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.kernels import IGNORED
from cuadrilla.model.language import NATS_PER_BIT, Pair, wins

WINDOWS_PER_BATCH = 16
RESAMPLES = 2_000
MOST_BLOCKS = 2_000
NORMAL_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`value` is `total / count`; `count` counts `unit`s. `error` is None where one item cannot tell."""

    name: str
    of: str
    """The file it was measured on, or what else."""
    value: float
    error: float | None
    low: float | None
    high: float | None
    total: float
    count: int
    unit: str
    items: tuple[tuple[float, int], ...] = ()
    """(part of `total`, part of `count`) of each document or pair, in the order of the test."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much more one model's figure is than another's on the same items, with a 95 % interval."""

    value: float
    low: float
    high: float


def difference(one: Figure, other: Figure) -> Difference | None:
    """`one` minus `other`, item by item; None if they do not share at least two items.

    What is hard in a text is hard for both, so this is surer than the two figures' own errors. The interval is that of
    `RESAMPLES` draws of as many items with replacement (percentile bootstrap; Efron and Tibshirani 1993, chapter 13);
    of more than `MOST_BLOCKS` items, neighbours are drawn together.
    """
    counts = np.array([count for _, count in one.items], dtype=np.float64)
    if len(counts) < 2 or [count for _, count in other.items] != [count for _, count in one.items]:
        return None
    parts = np.array([a - b for (a, _), (b, _) in zip(one.items, other.items, strict=True)])
    begins = np.unique(np.linspace(0, len(parts), min(len(parts), MOST_BLOCKS), endpoint=False).astype(np.int64))
    parts, counts = np.add.reduceat(parts, begins), np.add.reduceat(counts, begins)
    drawn = np.random.default_rng(0).multinomial(len(parts), np.full(len(parts), 1 / len(parts)), size=RESAMPLES)
    low, high = np.quantile(drawn @ parts / (drawn @ counts), [0.025, 0.975])
    return Difference(value=float(parts.sum() / counts.sum()), low=float(low), high=float(high))


@torch.no_grad()
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
    num_bytes = sum(sizes)
    if not num_bytes:
        raise DataError("{file} holds no text", file=of, hint="give a file of text")
    bits, error = math.fsum(value for value, _ in found), _error_of_ratio(found)
    by_document = np.bincount(document_of, weights=[value for value, _ in found], minlength=len(sizes)).tolist()
    value, margin = bits / num_bytes, None if error is None else NORMAL_95 * error
    return Figure(
        name="bits_per_byte", of=of, value=value, error=error, low=None if margin is None else value - margin,
        high=None if margin is None else value + margin, total=bits, count=num_bytes, unit="bytes",
        items=tuple(zip(by_document, sizes, strict=True)),
    )  # fmt: skip


def cut_windows(ids: Sequence[int], *, context: int) -> Iterator[tuple[list[int], int]]:
    """Pieces of at most `context` + 1 tokens, and how many of the last ones are new: each but the first once."""
    step = max(context // 2, 1)
    done = 1
    while done < len(ids):
        new = min(context if done == 1 else step, len(ids) - done)
        end = done + new
        yield list(ids[max(0, end - context - 1) : end]), new
        done = end


def _measure(model: GPT2, tokenizer: Tokenizer, batch: Sequence[tuple[list[int], int]]) -> list[tuple[float, int]]:
    """Bits of the new tokens of each window, and about how many bytes they are (a cut character counts in full)."""
    device = next(model.parameters()).device
    longest = max(len(ids) for ids, _ in batch)
    ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    targets_BT = torch.full((len(batch), longest - 1), IGNORED)
    for row, (ids, new) in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        targets_BT[row, len(ids) - 1 - new : len(ids) - 1] = torch.tensor(ids[-new:])
    losses_BT = model.losses(ids_BT[:, :-1].to(device), targets_BT.to(device))
    bits = (losses_BT.cpu().double().sum(1) / NATS_PER_BIT).tolist()
    sizes = [len(tokenizer.decode(ids[-new:]).encode()) for ids, new in batch]
    return list(zip(bits, sizes, strict=True))


def pair_figure(model: GPT2, tokenizer: Tokenizer, pairs: Sequence[Pair], *, of: str) -> Figure:
    """How often the allowed text of a pair is the likelier one; a tie counts half.

    With Wilson's interval (1927, doi:10.1080/01621459.1927.10502953).
    """
    items = tuple((part, 1) for part in wins(model, tokenizer, pairs))
    count, total, z = len(items), math.fsum(part for part, _ in items), NORMAL_95
    value = total / count
    middle = (value + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(value * (1 - value) / count + z**2 / (4 * count**2))
    return Figure(
        name="pairs_right", of=of, value=value, error=_error_of_ratio(items), low=max(middle - half, 0.0),
        high=min(middle + half, 1.0), total=total, count=count, unit="pairs", items=items,
    )  # fmt: skip


def _error_of_ratio(items: Sequence[tuple[float, int]]) -> float | None:
    """The standard error of Σ total / Σ count; None where one item cannot tell."""
    number, total = len(items), sum(size for _, size in items)
    if number < 2:
        return None
    ratio = math.fsum(value for value, _ in items) / total
    squares = math.fsum((value - ratio * size) ** 2 for value, size in items)
    return math.sqrt(squares * number / (number - 1)) / total
