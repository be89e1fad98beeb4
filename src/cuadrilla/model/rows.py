"""Continuous batching for a GPT-2: rows (sequences) join at any step, read their prompt, generate, and leave.

Invariants
* A row's result depends only on its own tokens and seed, up to the rounding of products of another size. It has its own
  generator of random numbers, and reads nothing of other rows.
* A step is one pass over the model. It takes the newest token of each row that generates, and parts of the prompts of
  rows that still read. So the weights are read once for both; on a CPU, reading them takes most of the time.
* A step reads at most `READ_TOKENS` tokens of prompts, so that a long prompt delays the other rows little.
* When a row fills the context, its last half is read again from position 0: GPT-2's positions are absolute, so a cache
  cannot be shifted. Of a prompt longer than the context only the last `context` tokens are read.
* Log probabilities are those of the model, before temperature, penalties, top_k and top_p.

Letters in tensor names: see `inference.py`.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, groupby
from typing import Literal

import torch
from torch import Tensor

from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.sampling import MAX_DRAW, Sampling, choose

Reason = Literal["stop", "length", "error"]
"""Why a row ended. `error`: the model's numbers are not finite."""
READ_TOKENS = 256


@dataclass(frozen=True)
class Score:
    """The log probability (nats) of a token in its place. `top`: the likeliest tokens there with theirs, in order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Row:
    """A sequence that is continued. `tokens` begins with the prompt. `reason` is None until the row has ended.

    `num_top` is the number of likeliest tokens in each of `scores`; with None, generated tokens are not scored.
    `scores_prompt` scores the tokens of the prompt, all but the first.
    """

    tokens: list[int]
    sampling: Sampling
    num_top: int | None = None
    scores_prompt: bool = False
    reason: Reason | None = None
    slot: int = field(init=False, default=-1)
    unread: list[int] = field(init=False, default_factory=list)
    scores: list[Score] = field(init=False, default_factory=list)
    prompt_scores: list[Score] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        assert self.tokens, "a prompt begins with the end-of-text token or another one"
        assert not self.sampling.stop, "stop strings need text: see TextStream"
        self._num_prompt = len(self.tokens)
        self._random = random.Random(str(self.sampling.seed))  # as text, so that every bit counts
        self._counts: Counter[int] = Counter()
        if not self.sampling.max_tokens and not self.scores_prompt:
            self.reason = "length"

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self._num_prompt]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self._num_prompt :]

    def draw(self) -> float:
        """A uniform random number, which chooses the row's next token."""
        return min(self._random.random(), MAX_DRAW)

    def take(self, token: int) -> int | None:
        """Append the next token and return it. A stop id ends the row instead, and None is returned."""
        if token in self.sampling.stop_ids:
            self.reason = "stop"
            return None
        self.tokens.append(token)
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._counts[token] += 1
        if len(self.tokens) - self._num_prompt == self.sampling.max_tokens:
            self.reason = "length"
        return token

    def penalize(self, logits_V: Tensor) -> None:
        """Subtract the penalties of generated tokens, in place."""
        if not self._counts:
            return
        presence, frequency = self.sampling.presence_penalty, self.sampling.frequency_penalty
        penalties_N = torch.tensor([presence + frequency * count for count in self._counts.values()])
        logits_V[list(self._counts)] -= penalties_N.to(logits_V)


class Rows:
    """Up to `slots` rows, each as long as the context. Used by one thread."""

    def __init__(self, model: InferenceModel, *, slots: int) -> None:
        self._model = model
        self._context = model.config.context
        self._cache = model.new_cache(slots)
        self._rows: list[Row] = []
        self._free = list(range(slots))  # a heap: the lowest free slot is taken first

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def free(self) -> int:
        return len(self._free)

    def join(self, row: Row) -> None:
        """Give the row a free slot."""
        assert row.reason is None
        row.slot = heappop(self._free)
        self._read_anew(row, row.tokens[-self._context :])
        self._rows.append(row)

    def leave(self, row: Row) -> None:
        """Remove a row, at its end or before. Its slot is free at once."""
        self._rows.remove(row)
        heappush(self._free, row.slot)

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, int | None]]:
        """Run one pass. Returns each row whose prompt is now read, with its next token. The token is None if the row
        ended without one: by a stop id, by an error, or because it was to generate nothing.

        Rows that have ended have left.
        """
        parts = self._parts()
        if not parts:
            return []
        x_NC = self._model.read(self._cache, [(row.slot, tokens) for row, tokens in parts])
        rows, last = [], []
        for (row, tokens), end in zip(parts, accumulate(len(tokens) for _, tokens in parts), strict=True):
            if row.scores_prompt and not row.generated:
                self._score_prompt(row, x_NC[end - len(tokens) : end])
            row.unread = row.unread[len(tokens) :]
            if not row.unread:
                rows.append(row)
                last.append(end - 1)
        chosen = _chosen(rows, self._model.logits(x_NC[last])) if rows else []
        for row, _ in chosen:
            if row.reason is not None:
                self.leave(row)
            elif self._cache.lengths[row.slot] == self._context:
                self._read_anew(row, row.tokens[-max(self._context // 2, 1) :])
            else:
                row.unread = row.tokens[-1:]
        return chosen

    def _parts(self) -> list[tuple[Row, list[int]]]:
        """What the next step reads, sorted by slot. Rows that joined earlier are the first to read their prompts."""
        left, parts = READ_TOKENS, []
        for row in self._rows:
            length = 1 if len(row.unread) == 1 else min(len(row.unread), left)
            left -= length if length > 1 else 0
            if length:
                parts.append((row, row.unread[:length]))
        return sorted(parts, key=lambda part: part[0].slot)

    def _read_anew(self, row: Row, tokens: list[int]) -> None:
        row.unread = tokens
        self._cache.lengths[row.slot] = 0

    def _score_prompt(self, row: Row, x_TC: Tensor) -> None:
        """Score the tokens that follow the positions just read; `x_TC` are their hidden states."""
        first = len(row.tokens) - len(row.unread) + 1
        if targets := row.tokens[first : first + len(x_TC)]:
            logits_NV = self._model.logits(x_TC[: len(targets)])
            row.prompt_scores += _scores(logits_NV, targets, num_top=row.num_top or 0)


def _chosen(rows: Sequence[Row], logits_BV: Tensor) -> list[tuple[Row, int | None]]:
    """Each row with its next token, sampled as the row asks; None for a row that ends without one."""
    finite_B = logits_BV.amax(-1).isfinite()
    logits_BV[~finite_B] = 0.0  # makes drawing a token possible; that token is not used
    scored = [place for place, row in enumerate(rows) if row.num_top is not None]
    raw = dict(zip(scored, logits_BV[scored], strict=True)) if scored else {}  # a copy, without penalties
    chosen: list[tuple[Row, int | None]] = []
    tokens, is_finite = _sampled(rows, logits_BV), finite_B.tolist()
    for place, row in enumerate(rows):
        taken = None
        if not is_finite[place]:
            row.reason = "error"
        elif not row.sampling.max_tokens:
            row.reason = "length"
        else:
            taken = row.take(tokens[place])
        if taken is not None and place in raw:
            row.scores += _scores(raw[place][None], [taken], num_top=row.num_top or 0)
        chosen.append((row, taken))
    return chosen


def _sampled(rows: Sequence[Row], logits_BV: Tensor) -> list[int]:
    """A token for each row. Rows with equal sampling settings are computed together."""
    for row, logits_V in zip(rows, logits_BV, strict=True):
        row.penalize(logits_V)

    def way(place: int) -> tuple[float, int, float]:
        sampling = rows[place].sampling
        return sampling.temperature, sampling.top_k, sampling.top_p

    tokens = [0] * len(rows)
    for _, group in groupby(sorted(range(len(rows)), key=way), key=way):
        places = list(group)
        draws_B = torch.tensor([rows[place].draw() for place in places], device=logits_BV.device)
        logits = logits_BV if len(places) == len(rows) else logits_BV[places]
        ids_B = choose(logits, sampling=rows[places[0]].sampling, draws_B=draws_B)
        for place, token in zip(places, ids_B.tolist(), strict=True):
            tokens[place] = token
    return tokens


def _scores(logits_NV: Tensor, tokens: Sequence[int], *, num_top: int) -> Iterator[Score]:
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    of_tokens = logprobs_NV.gather(1, torch.tensor(tokens, device=logits_NV.device)[:, None])[:, 0].tolist()
    values_NK, ids_NK = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]))
    tops = zip(ids_NK.tolist(), values_NK.tolist(), strict=True)
    for token, logprob, (ids, values) in zip(tokens, of_tokens, tops, strict=True):
        yield Score(token, logprob, tuple(zip(ids, values, strict=True)))
