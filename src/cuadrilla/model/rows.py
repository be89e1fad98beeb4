"""Sequences that a GPT-2 continues together: each one joins, reads its prompt, generates and leaves when it likes.

Invariants
* What a row gets depends on its own tokens and seed, up to the rounding of products of another size: its random numbers
  come from a generator of its own, and it reads nothing of other rows.
* A step reads at most `READ_TOKENS` of prompts, so that nobody who generates waits long for somebody else's prompt.
* When a row fills the context, its last half is read again at position 0 (as GPT-2 has absolute positions, a cache
  cannot be shifted). Of a longer prompt only the last `context` tokens are read.
* Slots of the cache: rows that generate come first, then those that read. Nothing is computed for free slots.

Letters in tensor names: see `gpt2.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from cuadrilla.errors import ConfigError
from cuadrilla.model.gpt2 import GPT2, KVCache
from cuadrilla.model.sampling import Sampling, choose

Reason = Literal["stop", "length"]
READ_TOKENS = 2048
DRAWS_AT_ONCE = 64
MOST_DRAW = 1 - 2**-20
"""So that a draw times the total of a distribution stays below the total."""


@dataclass(eq=False)
class Row:
    """A sequence that is continued. `tokens` begins with the prompt; `reason`: why it has ended, None before."""

    tokens: list[int]
    sampling: Sampling
    reason: Reason | None = None
    unread: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Raises ConfigError for stop strings, which need text, and for a prompt without tokens."""
        if self.sampling.stop:
            raise ConfigError("stop strings need text", hint="use generate_text, or stop_ids")
        if not self.tokens:
            raise ConfigError("a prompt has no tokens", hint="begin with the end-of-text token")
        self._num_prompt = len(self.tokens)
        self._generator = torch.Generator().manual_seed(self.sampling.seed)
        self._draws: list[float] = []
        if not self.sampling.max_tokens:
            self.reason = "length"

    @property
    def generated(self) -> list[int]:
        return self.tokens[self._num_prompt :]

    @property
    def draw(self) -> float:
        """The uniform random number that chooses its next token."""
        number = len(self.tokens) - self._num_prompt
        if number == len(self._draws):
            self._draws += torch.rand(DRAWS_AT_ONCE, generator=self._generator).clamp_(max=MOST_DRAW).tolist()
        return self._draws[number]

    def take(self, token: int) -> int | None:
        """Its next token; None for a stop id, which ends it."""
        if token in self.sampling.stop_ids:
            self.reason = "stop"
            return None
        self.tokens.append(token)
        if len(self.tokens) - self._num_prompt == self.sampling.max_tokens:
            self.reason = "length"
        return token


class Rows:
    """Up to `slots` rows of at most `capacity` positions each (0: the context). Used by one thread."""

    def __init__(self, model: GPT2, *, slots: int, capacity: int = 0) -> None:
        """`model`: as `for_inference` gives it."""
        assert model.inference_copy
        self._model = model
        self._context = model.config.context
        self._cache = model.new_cache(slots, min(capacity or self._context, self._context))
        self._device = model.transformer.wte.weight.device
        self._rows: list[Row] = []
        self._num_generating = 0

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
        self._cache.lengths[len(self._rows)] = 0
        self._rows.append(row)

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
        """One more token of every row that generates, and of those whose prompt is now read; None for a stop id.

        Rows that have ended have left.
        """
        chosen = self._generate() + self._read()
        for row, _ in chosen:
            if row.reason is not None:
                self.leave(row)
            elif self._cache.lengths[slot := self._rows.index(row)] == self._context:
                self._read_again(slot)
        return chosen

    def _generate(self) -> list[tuple[Row, int | None]]:
        rows = self._rows[: self._num_generating]
        if not rows:
            return []
        ids_B1 = torch.tensor([row.tokens[-1:] for row in rows], device=self._device)
        return _chosen(rows, self._forward(0, ids_B1, [1] * len(rows)))

    def _read(self) -> list[tuple[Row, int | None]]:
        """A part of each prompt; padding is written behind the shorter ones, and later overwritten."""
        first, rows = self._num_generating, self._rows[self._num_generating :]
        rows = rows[:READ_TOKENS]
        if not rows:
            return []
        room = self._cache.capacity - max(self._cache.lengths[first : first + len(rows)])
        length = min(max(len(row.unread) for row in rows), max(1, READ_TOKENS // len(rows)), room)
        parts = [row.unread[:length] for row in rows]
        ids_BT = torch.tensor([part + [0] * (length - len(part)) for part in parts], device=self._device)
        logits_BV = self._forward(first, ids_BT, [len(part) for part in parts])
        for row, part in zip(rows, parts, strict=True):
            row.unread = row.unread[len(part) :]
        done = [place for place, row in enumerate(rows) if not row.unread]
        for place in done:
            self._swap(self._rows.index(rows[place]), self._num_generating)
            self._num_generating += 1
        return _chosen([rows[place] for place in done], logits_BV[done]) if done else []

    def _read_again(self, slot: int) -> None:
        """The row that generates in `slot` has filled the context."""
        self._num_generating -= 1
        self._swap(slot, self._num_generating)
        row = self._rows[self._num_generating]
        row.unread = row.tokens[-max(self._context // 2, 1) :]
        self._cache.lengths[self._num_generating] = 0

    def _forward(self, first: int, ids_BT: Tensor, counts: list[int]) -> Tensor:
        """Read positions into the slots from `first` on; logits `(B, V)` of the last real one of each."""
        slots = slice(first, first + len(ids_BT))
        cache = KVCache(
            k_LBHSD=self._cache.k_LBHSD[:, slots],
            v_LBHSD=self._cache.v_LBHSD[:, slots],
            lengths=self._cache.lengths[slots],
        )
        logits_BV = self._model.forward_cached(ids_BT, cache, counts=counts)
        self._cache.lengths[slots] = cache.lengths
        return logits_BV

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


def _chosen(rows: Sequence[Row], logits_BV: Tensor) -> list[tuple[Row, int | None]]:
    """The next token of each, as it samples; those that sample alike are chosen for at once."""

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
    return [(row, row.take(token)) for row, token in zip(rows, tokens, strict=True)]
