"""Sequences that a GPT-2 continues together: each one joins, reads its prompt, generates and leaves when it likes.

Invariants
* What a row gets depends on its own tokens and seed, up to the rounding of products of another size: its random numbers
  come from a generator of its own, and it reads nothing of other rows.
* A step is one pass over the model, with the newest tokens of those that generate and parts of the prompts of those
  that read: the weights, whose reading is most of the time on a CPU, are read once for both.
* A step reads at most `READ_TOKENS` of prompts, and while others generate no more than makes it about `READ_SECONDS`
  longer, so that nobody waits long for somebody else's prompt; up to `MOST_READ_SECONDS` when more read than generate.
* When a row fills the context, its last half is read again at position 0 (as GPT-2 has absolute positions, a cache
  cannot be shifted). Of a longer prompt only the last `context` tokens are read.
* Slots of the cache: rows that generate come first, then those that read. Nothing is computed for free slots.
* Log probabilities are those of the model: before temperature, penalties and what cuts the distribution.

Letters in tensor names: see `gpt2.py`.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from cuadrilla.errors import ConfigError
from cuadrilla.model.gpt2 import GPT2, CachedReading, KVCache, last_of
from cuadrilla.model.prefixes import Prefixes
from cuadrilla.model.sampling import Sampling, choose, draws

Reason = Literal["stop", "length", "error"]
"""`error`: the model's numbers are not finite."""
READ_TOKENS = 2048
LEAST_READ_TOKENS, FIRST_READ_TOKENS = 32, 256
"""The latter while it is not known how fast prompts are read."""
LEAST_PART = 0.2
"""Of a step's time, which prompts are taken to have cost whatever the mean of others says."""
READ_SECONDS, MOST_READ_SECONDS = 0.05, 0.4
SCORED_AT_ONCE = 128
"""Positions of a prompt whose logits are held at a time."""


@dataclass(frozen=True)
class Score:
    """The log probability of a token in its place, and the most likely tokens there with theirs, the best one first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Row:
    """A sequence that is continued. `tokens` begins with the prompt; `reason`: why it has ended, None before.

    `num_top`: how many most likely tokens each of `scores` names; None: nothing is scored. With `scores_prompt` the
    prompt's tokens are scored, too, but for the first.
    """

    tokens: list[int]
    sampling: Sampling
    num_top: int | None = None
    scores_prompt: bool = False
    reason: Reason | None = None
    unread: list[int] = field(init=False, default_factory=list)
    scores: list[Score] = field(init=False, default_factory=list)
    prompt_scores: list[Score] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Raises ConfigError for stop strings, which need text, and for a prompt without tokens."""
        if self.sampling.stop:
            raise ConfigError("stop strings need text", hint="use generate_text, or stop_ids")
        if not self.tokens:
            raise ConfigError("a prompt has no tokens", hint="begin with the end-of-text token")
        self._num_prompt = len(self.tokens)
        self._uniform = draws(self.sampling.seed)
        self._draws: list[float] = []
        self._counts: Counter[int] = Counter()
        if not self.sampling.max_tokens and not self.scores_prompt:
            self.reason = "length"

    @property
    def generated(self) -> list[int]:
        return self.tokens[self._num_prompt :]

    @property
    def draw(self) -> float:
        """The uniform random number that chooses its next token."""
        number = len(self.tokens) - self._num_prompt
        if number == len(self._draws):
            self._draws.append(next(self._uniform))
        return self._draws[number]

    def take(self, token: int) -> int | None:
        """Its next token; None for a stop id, which ends it."""
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
        """In place."""
        if not self._counts:
            return
        presence, frequency = self.sampling.presence_penalty, self.sampling.frequency_penalty
        penalties_N = torch.tensor([presence + frequency * count for count in self._counts.values()])
        logits_V[list(self._counts)] -= penalties_N.to(logits_V)


class Rows:
    """Up to `slots` rows of at most `capacity` positions each (0: the context). Used by one thread."""

    def __init__(self, model: GPT2, *, slots: int, capacity: int = 0, prefixes: Prefixes | None = None) -> None:
        """`model`: as `for_inference` gives it. With `prefixes`, what a prompt shares with others is read once."""
        assert model.inference_copy
        self._model = model
        self._context = model.config.context
        self._cache = model.new_cache(slots, min(capacity or self._context, self._context))
        self._device = model.transformer.wte.weight.device
        self._rows: list[Row] = []
        self._num_generating = 0
        self._prefixes = prefixes
        self._pace = ReadPace()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def free(self) -> int:
        return len(self._cache.lengths) - len(self._rows)

    def join(self, row: Row) -> None:
        """Raises ConfigError for tokens that the model does not know."""
        assert self.free
        assert row.reason is None
        vocab_size = self._model.config.vocab_size
        if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
            raise ConfigError(
                "a prompt has tokens outside of the model's vocabulary of {tokens:,}",
                tokens=vocab_size,
                hint="use the tokenizer that the model was trained with",
            )
        row.unread = row.tokens[-self._context :]
        known = self._copy_prefix(row, slot=len(self._rows))
        self._cache.lengths[len(self._rows)] = known
        row.unread = row.unread[known:]
        self._rows.append(row)

    def _copy_prefix(self, row: Row, *, slot: int) -> int:
        """How many of its tokens need not be read; at least the last one is, for its logits."""
        if self._prefixes is None or row.scores_prompt:
            return 0
        known, prefix = self._prefixes.find(row.unread[:-1])
        if prefix is not None:
            self._cache.k_LBHSD[:, slot, :, :known] = prefix.k_LHND[:, :, :known]
            self._cache.v_LBHSD[:, slot, :, :known] = prefix.v_LHND[:, :, :known]
        return known

    def leave(self, row: Row) -> None:
        """Before its end, or at it: its slot is free at once."""
        slot = self._rows.index(row)
        if slot < self._num_generating:
            self._num_generating -= 1
            self._move(self._num_generating, slot)
            slot = self._num_generating
        self._move(len(self._rows) - 1, slot)
        self._rows.pop()

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, int | None]]:
        """One more token of every row that generates, and of those whose prompt is now read; None where one has ended
        without: by a stop id, an error, or because nothing was to be generated.

        Rows that have ended have left.
        """
        chosen = self._pass()
        for row, _ in chosen:
            if row.reason is not None:
                self.leave(row)
            elif self._cache.lengths[slot := self._rows.index(row)] == self._context:
                self._read_again(slot)
        return chosen

    def _pass(self) -> list[tuple[Row, int | None]]:
        """Once through the model, with the newest token of all that generate and a part of each prompt."""
        began = time.perf_counter()
        generating = self._rows[: self._num_generating]
        reading, parts = self._parts()
        given = [self._reading(0, [row.tokens[-1:] for row in generating])] if generating else []
        given += [self._reading(len(generating), parts)] if reading else []
        if not given:
            return []
        hidden = self._model.read_together(given)
        self._cache.lengths[: len(generating) + len(reading)] = [n for each in given for n in each.cache.lengths]
        last = [hidden[0][:, -1]] if generating else []
        rows = list(generating)
        if reading:
            done = self._take_parts(reading, parts, hidden[-1])
            last.append(last_of(hidden[-1], [len(part) for part in parts])[done])
            rows += [reading[place] for place in done]
        chosen = _chosen(rows, self._model.logits(torch.cat(last))) if rows else []
        num_read = sum(each.ids_BT.numel() for each in given) - len(generating)
        self._pace.add(tokens=num_read, beside=bool(generating), seconds=time.perf_counter() - began)
        return chosen

    def _parts(self) -> tuple[list[Row], list[list[int]]]:
        """Who reads in this step, and what."""
        first, rows = self._num_generating, self._rows[self._num_generating :]
        most = self._pace.most_read(reading=len(rows), generating=first)
        rows = rows[:most]
        if not rows:
            return [], []
        room = self._cache.capacity - max(self._cache.lengths[first : first + len(rows)])
        length = min(max(len(row.unread) for row in rows), max(1, most // len(rows)), room)
        return rows, [row.unread[:length] for row in rows]

    def _reading(self, first: int, parts: list[list[int]]) -> CachedReading:
        """Into the slots from `first` on; padding is written behind the shorter ones, and later overwritten."""
        slots, length = slice(first, first + len(parts)), max(map(len, parts))
        ids_BT = torch.tensor([part + [0] * (length - len(part)) for part in parts], device=self._device)
        keys, values = self._cache.k_LBHSD[:, slots], self._cache.v_LBHSD[:, slots]
        return CachedReading(ids_BT, KVCache(keys, values, self._cache.lengths[slots]), [len(part) for part in parts])

    def _take_parts(self, rows: list[Row], parts: list[list[int]], x_BTC: Tensor) -> list[int]:
        """They have been read. The places of those whose prompt is now whole, and who generate from now on."""
        for row, part, x_TC in zip(rows, parts, x_BTC, strict=True):
            if row.scores_prompt:
                self._score_prompt(row, x_TC[: len(part)])
            row.unread = row.unread[len(part) :]
        done = [place for place, row in enumerate(rows) if not row.unread]
        for place in done:
            self._begin(rows[place])
        return done

    def _begin(self, row: Row) -> None:
        """Its prompt is read: it generates from now on."""
        slot = self._rows.index(row)
        if self._prefixes is not None and self._cache.lengths[slot] == len(row.tokens):
            self._prefixes.keep(row.tokens, self._cache.k_LBHSD[:, slot], self._cache.v_LBHSD[:, slot])
        self._swap(slot, self._num_generating)
        self._num_generating += 1

    def _score_prompt(self, row: Row, x_TC: Tensor) -> None:
        """Of the tokens behind the positions that were just read."""
        first = len(row.tokens) - len(row.unread) + 1
        targets = row.tokens[first : first + len(x_TC)]
        for start in range(0, len(targets), SCORED_AT_ONCE):
            part = targets[start : start + SCORED_AT_ONCE]
            logits_NV = self._model.logits(x_TC[start : start + len(part)])
            row.prompt_scores += _scores(logits_NV, part, num_top=row.num_top or 0)

    def _read_again(self, slot: int) -> None:
        """The row that generates in `slot` has filled the context."""
        self._num_generating -= 1
        self._swap(slot, self._num_generating)
        row = self._rows[self._num_generating]
        row.unread = row.tokens[-max(self._context // 2, 1) :]
        self._cache.lengths[self._num_generating] = 0

    def _move(self, source: int, target: int) -> None:
        """The row of one slot into another one, whose own row is gone."""
        if source == target:
            return
        length = self._cache.lengths[source]
        for kept in (self._cache.k_LBHSD, self._cache.v_LBHSD):
            kept[:, target, :, :length] = kept[:, source, :, :length]
        self._cache.lengths[target] = length
        self._rows[target] = self._rows[source]

    def _swap(self, one: int, other: int) -> None:
        if one == other:
            return
        lengths = self._cache.lengths
        length = max(lengths[one], lengths[other])
        for kept in (self._cache.k_LBHSD, self._cache.v_LBHSD):
            kept[:, [one, other], :, :length] = kept[:, [other, one], :, :length]
        lengths[one], lengths[other] = lengths[other], lengths[one]
        self._rows[one], self._rows[other] = self._rows[other], self._rows[one]


class ReadPace:
    """How long steps take, as running means, and what of prompts a step may therefore read."""

    def __init__(self) -> None:
        self._tokens_per_second = math.inf
        """Of prompts: what a step takes longer for them."""
        self._seconds = 0.0
        """Of a step without prompts."""

    def most_read(self, *, reading: int, generating: int) -> int:
        """Tokens of prompts."""
        seconds = MOST_READ_SECONDS
        if generating:
            seconds = min(seconds, READ_SECONDS * max(1.0, reading / generating))
        most = FIRST_READ_TOKENS if math.isinf(self._tokens_per_second) else self._tokens_per_second * seconds
        return int(min(READ_TOKENS, max(LEAST_READ_TOKENS, most)))

    def add(self, *, tokens: int, beside: bool, seconds: float) -> None:
        """Of a step, which read so many tokens of prompts, `beside` generating for others."""
        if not tokens:
            self._seconds = 0.7 * self._seconds + 0.3 * seconds if self._seconds else seconds
        elif tokens >= LEAST_READ_TOKENS:
            own = max(seconds - self._seconds, seconds * LEAST_PART) if beside else seconds
            rate = tokens / max(own, 1e-6)
            known = self._tokens_per_second
            self._tokens_per_second = rate if math.isinf(known) else 0.7 * known + 0.3 * rate


def _chosen(rows: Sequence[Row], logits_BV: Tensor) -> list[tuple[Row, int | None]]:
    """The next token of each, as it samples; those that sample alike are chosen for at once."""
    finite = logits_BV.amax(-1).isfinite().tolist()
    wanted = [place for place, row in enumerate(rows) if finite[place] and row.sampling.max_tokens]
    tokens = _sampled([rows[place] for place in wanted], logits_BV if len(wanted) == len(rows) else logits_BV[wanted])
    found: dict[int, int] = dict(zip(wanted, tokens, strict=True))
    chosen: list[tuple[Row, int | None]] = []
    for place, row in enumerate(rows):
        if place in found:
            chosen.append((row, row.take(found[place])))
        else:
            row.reason = "length" if finite[place] else "error"
            chosen.append((row, None))
    return chosen


def _sampled(rows: Sequence[Row], logits_BV: Tensor) -> list[int]:
    scored = [place for place, row in enumerate(rows) if row.num_top is not None]
    raw_PV = logits_BV[scored] if scored else logits_BV  # a copy, which penalties leave alone
    for row, logits_V in zip(rows, logits_BV, strict=True):
        row.penalize(logits_V)

    def way(place: int) -> tuple[float, int, float]:
        sampling = rows[place].sampling
        return sampling.temperature, sampling.top_k, sampling.top_p

    tokens = [0] * len(rows)
    for _, group in groupby(sorted(range(len(rows)), key=way), key=way):
        places = list(group)
        draws_B = torch.tensor([rows[place].draw for place in places], device=logits_BV.device)
        logits = logits_BV if len(places) == len(rows) else logits_BV[places]
        ids_B = choose(logits, sampling=rows[places[0]].sampling, draws_B=draws_B)
        for place, token in zip(places, ids_B.tolist(), strict=True):
            tokens[place] = token
    for place, logits_V in zip(scored, raw_PV, strict=False):
        row = rows[place]
        if tokens[place] not in row.sampling.stop_ids:
            row.scores += _scores(logits_V[None], [tokens[place]], num_top=row.num_top or 0)
    return tokens


def _scores(logits_NV: Tensor, tokens: Sequence[int], *, num_top: int) -> Iterator[Score]:
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    of_tokens = logprobs_NV.gather(1, torch.tensor(tokens, device=logits_NV.device)[:, None])[:, 0].tolist()
    values_NK, ids_NK = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]))
    tops = zip(ids_NK.tolist(), values_NK.tolist(), strict=True)
    for token, logprob, (ids, values) in zip(tokens, of_tokens, tops, strict=True):
        yield Score(token, logprob, tuple(zip(ids, values, strict=True)))
