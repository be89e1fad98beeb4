"""Figures that compare language models, whatever their tokenizers: each with its sums and how uncertain it is.

* Bits per byte of UTF-8. Each document begins after an end-of-text token; each token is predicted once, from the second
  window on with at least half a context before it. End-of-text itself is not predicted, so that only text counts.
* Minimal pairs: how often the allowed text is likelier than the other.
* Last word: how often greedy decoding writes the last word of a passage, all tokens of it.
* Variety of samples: distinct-n (Li et al. 2016, arXiv 1510.03055: different n-grams over all n-grams, here of words,
  of all samples together) and repetition (4-grams that have occurred before in the same sample).

`error` is a standard error: over windows for bits per byte (the ratio's linearisation; neighbouring windows of one text
are alike, so it is rather too small), over items for shares, by the jackknife over samples for distinct-n. `low` and
`high` are a 95 % interval: Wilson's for shares of right answers, which holds at 0 and 1 too. Two models are compared by
`difference`, on the same documents, pairs or passages.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.model.generate import for_inference, generate_batch
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.kernels import IGNORED
from cuadrilla.model.language import NATS_PER_BIT, Pair, wins
from cuadrilla.model.sampling import Sampling
from cuadrilla.train.eval_data import Passage

WINDOWS_PER_BATCH = 16
PROMPTS_PER_BATCH = 32
SAMPLES_PER_BATCH = 100
REPEATED_WORDS = 4
RESAMPLES = 2_000
MOST_BLOCKS = 2_000
NORMAL_95 = 1.959964

_WORD = re.compile(r"\w+")


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
    """(part of `total`, part of `count`) of each document, pair or passage, in the order of the test."""


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
    bits = math.fsum(value for value, _ in found)
    ratio, count = bits / num_bytes, len(found)
    squares = math.fsum((value - ratio * size) ** 2 for value, size in found)
    error = math.sqrt(squares * count / (count - 1)) / num_bytes if count > 1 else None
    by_document = np.bincount(document_of, weights=[value for value, _ in found], minlength=len(sizes)).tolist()
    figure = _normal("bits_per_byte", of=of, total=bits, count=num_bytes, unit="bytes", error=error)
    return replace(figure, items=tuple(zip(by_document, sizes, strict=True)))


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
    """How often the allowed text of a pair is the likelier one; a tie counts half."""
    return _share("pairs_right", wins(model, tokenizer, pairs), of=of, unit="pairs")


def last_word_figure(model: GPT2, tokenizer: Tokenizer, passages: Sequence[Passage], *, of: str) -> Figure:
    """How often the last word is what greedy decoding writes. Of a long passage, what fits the context is read."""
    ready = for_inference(model)
    words = tokenizer.encode_batch([passage.word for passage in passages])
    before = tokenizer.encode_batch([passage.context for passage in passages])
    order = sorted(range(len(words)), key=lambda number: len(before[number]))
    right = [0.0] * len(words)
    for first in range(0, len(order), PROMPTS_PER_BATCH):
        chosen = order[first : first + PROMPTS_PER_BATCH]
        longest = max(len(words[number]) for number in chosen)
        room = max(model.config.context - longest, 1)
        prompts = [[tokenizer.end_of_text, *before[number]][-room:] for number in chosen]
        written = generate_batch(ready, prompts, sampling=Sampling(temperature=0, max_tokens=longest))
        for number, ids in zip(chosen, written, strict=True):
            right[number] = float(ids[: len(words[number])] == words[number])
    return _share("last_word_right", right, of=of, unit="passages")


def variety_figures(model: GPT2, tokenizer: Tokenizer, *, num_samples: int, sampling: Sampling) -> list[Figure]:
    """Distinct-1, -2, -3 and repetition of samples that begin a document."""
    ready = for_inference(model)
    end = tokenizer.end_of_text
    texts: list[str] = []
    for first in range(0, num_samples, SAMPLES_PER_BATCH):
        prompts = [[end]] * min(SAMPLES_PER_BATCH, num_samples - first)
        wanted = replace(sampling, stop_ids=(end,), seed=sampling.seed + first)
        texts += [tokenizer.decode(ids) for ids in generate_batch(ready, prompts, sampling=wanted)]
    return variety_of(texts, of=Message("{samples} samples", samples=num_samples))


def variety_of(texts: Sequence[str], *, of: str) -> list[Figure]:
    """As `variety_figures`, of given texts; a figure without an n-gram is left out."""
    words = [_WORD.findall(text.lower()) for text in texts]
    figures = [figure for n in (1, 2, 3) if (figure := _distinct(words, n=n, of=of))]
    repeated = [1 - len(set(grams)) / len(grams) for text in words if (grams := list(_ngrams(text, n=REPEATED_WORDS)))]
    if repeated:
        total = math.fsum(repeated)
        error = _error_of_mean(repeated)
        figures.append(_normal("repetition", of=of, total=total, count=len(repeated), unit="samples", error=error))
    return figures


def _ngrams(words: Sequence[str], *, n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)


def _distinct(samples: Sequence[Sequence[str]], *, n: int, of: str) -> Figure | None:
    counted = [Counter(_ngrams(words, n=n)) for words in samples]
    together: Counter[tuple[str, ...]] = Counter()
    for counts in counted:
        together.update(counts)
    total, unique = together.total(), len(together)
    if not total:
        return None
    without = []  # the figure with one sample left out
    for counts in counted:
        rest = total - counts.total()
        own = sum(together[gram] == number for gram, number in counts.items())
        if rest:
            without.append((unique - own) / rest)
    mean = math.fsum(without) / max(len(without), 1)
    squares = math.fsum((value - mean) ** 2 for value in without)
    error = math.sqrt(squares * (len(without) - 1) / len(without)) if len(without) > 1 else None
    return _normal(f"distinct_{n}", of=of, total=unique, count=total, unit=f"{n}-grams", error=error)


def _normal(name: str, *, of: str, total: float, count: int, unit: str, error: float | None) -> Figure:
    value = total / count
    low, high = (None, None) if error is None else (value - NORMAL_95 * error, value + NORMAL_95 * error)
    return Figure(name=name, of=of, value=value, error=error, low=low, high=high, total=total, count=count, unit=unit)


def _share(name: str, right: Sequence[float], *, of: str, unit: str) -> Figure:
    """A part of right answers, with Wilson's interval (1927, doi:10.1080/01621459.1927.10502953)."""
    count, total = len(right), math.fsum(right)
    value, z = total / count, NORMAL_95
    middle = (value + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(value * (1 - value) / count + z**2 / (4 * count**2))
    return Figure(
        name=name, of=of, value=value, error=_error_of_mean(right), low=max(middle - half, 0.0),
        high=min(middle + half, 1.0), total=total, count=count, unit=unit, items=tuple((part, 1) for part in right),
    )  # fmt: skip


def _error_of_mean(values: Sequence[float]) -> float | None:
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
