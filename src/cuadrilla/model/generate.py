"""Sampling from a GPT-2 with a key-value cache: token by token, as text, or many prompts at once.

Invariants
* The random numbers of row i come from a generator of its own, seeded with `sampling.seed + i`: never from torch's
  global one, and independent of which other rows there are.
* When a row fills the context, its last half is read again at position 0 and generation goes on (as GPT-2 has
  absolute positions, a cache cannot be shifted). Of a longer prompt only the last `context` tokens are read.
* A stop id or a stop string is not part of what is generated. Text pieces joined are the decoded text: a character
  of several tokens waits until it is whole, and so does text that may begin a stop string.

Letters in tensor names: see `gpt2.py`.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from cuadrilla.errors import ConfigError
from cuadrilla.model.gpt2 import GPT2, Linear
from cuadrilla.model.kernels import has_onednn, pack

Reason = Literal["stop", "length"]
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole (top_k acts first)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        if not temperature >= 0:
            hint = "0 is greedy, 1 samples as is"
            raise ConfigError("temperature {temperature} is negative", temperature=temperature, hint=hint)
        if self.top_k < 0:
            raise ConfigError("top_k {top_k} is negative", top_k=self.top_k, hint="use 0 for no limit")
        if not 0 < top_p <= 1:
            raise ConfigError("top_p {top_p} is not in (0, 1]", top_p=top_p, hint="use 1 for no limit")
        if self.max_tokens < 0:
            raise ConfigError("max_tokens {tokens} is negative", tokens=self.max_tokens, hint="use 0 or more")
        if not all(self.stop):
            raise ConfigError("a stop string is empty", hint="leave it out")


class TextTokenizer(Protocol):
    """What is needed of `data.tokenizer.Tokenizer`."""

    end_of_text: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def generate(model: GPT2, prompt_ids: list[int], *, sampling: Sampling) -> Generator[int, None, Reason]:
    """Continue a prompt. Yields ids, returns why it ended. Stop strings need text: see `generate_text`."""
    rows = _Rows(model, [prompt_ids], sampling=sampling)
    while rows.active:
        ((_, token),) = rows.advance().items()
        if token is not None:
            yield token
    return rows.reasons[0]


def generate_batch(model: GPT2, prompts: list[list[int]], *, sampling: Sampling) -> list[list[int]]:
    """Continue many prompts together: as `generate` with the seed `sampling.seed + i` for prompt i."""
    if not prompts:
        return []
    rows = _Rows(model, prompts, sampling=sampling)
    while rows.active:
        rows.advance()
    return [tokens[len(prompt) :] for tokens, prompt in zip(rows.tokens, prompts, strict=True)]


def generate_text(
    model: GPT2, tokenizer: TextTokenizer, prompt: str, *, sampling: Sampling
) -> Generator[str, None, Reason]:
    """Continue a text in pieces; ends at the end-of-text token too. An empty prompt begins a new document."""
    stop_ids = (*sampling.stop_ids, tokenizer.end_of_text)
    stream = TextStream(tokenizer, stop=sampling.stop)
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    ids = generate(model, prompt_ids, sampling=replace(sampling, stop=(), stop_ids=stop_ids))
    reason: Reason = "length"
    while not stream.stopped:
        try:
            piece = stream.push(next(ids))
        except StopIteration as end:
            reason = end.value
            break
        if piece:
            yield piece
    piece = stream.finish()
    if piece:
        yield piece
    return "stop" if stream.stopped else reason


class TextStream:
    """Turns ids into text as they come. After `stopped`, nothing more is to be pushed."""

    def __init__(self, tokenizer: TextTokenizer, *, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []  # since the last point where their text ended with a whole character
        self._num_decoded = 0  # characters of that text that are in `_held` or gone
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is now certain, often ""."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = len(text) - text.endswith(REPLACEMENT)  # only the last character can still change
        self._held += text[self._num_decoded : whole]
        if whole == len(text):
            self._ids, self._num_decoded = [], 0
        else:
            self._num_decoded = whole
        return self._release(final=False)

    def finish(self) -> str:
        """The rest, which no longer waits for anything."""
        if not self.stopped:
            self._held += self._tokenizer.decode(self._ids)[self._num_decoded :]
            self._ids, self._num_decoded = [], 0
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if self.stopped or found:
            ready = self._held[: min(found)] if found else ""
            self._held, self.stopped = "", True
            return ready
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def choose(logits_BV: Tensor, *, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """One id per row: the best, or the one that a uniform number in [0, 1) picks from the distribution."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    # Differences to the largest logit: dividing by a tiny temperature then overflows to -inf, never to nan.
    p_BK = torch.softmax((logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature, -1)
    ids_BK = None
    if 0 < sampling.top_k < p_BK.shape[-1]:
        p_BK, ids_BK = p_BK.topk(sampling.top_k)
        p_BK = p_BK / p_BK.sum(-1, keepdim=True)
    if sampling.top_p < 1:
        if ids_BK is None:
            p_BK, ids_BK = p_BK.sort(dim=-1, descending=True, stable=True)
        p_BK = p_BK.masked_fill(p_BK.cumsum(-1) - p_BK >= sampling.top_p, 0.0)
    cumulative_BK = p_BK.cumsum(-1)
    targets_B1 = draws_B[:, None] * cumulative_BK[:, -1:]
    choice_B1 = torch.searchsorted(cumulative_BK, targets_B1, right=True)
    return (choice_B1 if ids_BK is None else ids_BK.gather(1, choice_B1))[:, 0]


def for_inference(model: GPT2) -> GPT2:
    """A copy that reads its weights as fast as it can, for many tokens; `generate` makes one if it is given none.

    On a CPU with oneDNN it shares the parameters, and in bf16 holds a packed copy of the matrices besides. Elsewhere
    it holds weights in the compute dtype, as a cast costs more than a token.
    """
    dtype, device = model.compute_dtype, model.transformer.wte.weight.device
    if model.inference_copy:
        return model
    with torch.device("meta"):
        copy = GPT2(model.config)
    state = model.state_dict()
    packs = has_onednn(device, dtype)
    copy.load_state_dict(state if packs else {name: value.to(dtype) for name, value in state.items()}, assign=True)
    if packs:
        copy.head.packed = pack(copy.head.weight, dtype)
        for module in copy.modules():
            if isinstance(module, Linear):
                module.packed = pack(module.weight, dtype), module.bias.detach().to(dtype)
    copy.compute_dtype, copy.inference_copy = dtype, True
    return copy.eval()


class _Rows:
    """Sequences that are generated together. Slot i of the cache belongs to row `slots[i]`."""

    def __init__(self, model: GPT2, prompts: list[list[int]], *, sampling: Sampling) -> None:
        if sampling.stop:
            raise ConfigError("stop strings need text", hint="use generate_text, or stop_ids")
        _check_prompts(prompts, vocab_size=model.config.vocab_size)
        self._model = for_inference(model)
        self._sampling = sampling
        self._context = model.config.context
        self._device = model.transformer.wte.weight.device
        capacity = min(max(map(len, prompts)) + sampling.max_tokens, self._context)
        self._cache = self._model.new_cache(len(prompts), capacity)
        self._draws_BN = torch.stack(
            [
                torch.rand(sampling.max_tokens, generator=torch.Generator().manual_seed(sampling.seed + row))
                for row in range(len(prompts))
            ]
        ).clamp_(max=1 - 2**-20)  # so that a draw times the total of a distribution stays below the total
        self._draws_BN = self._draws_BN.to(self._device)
        self._num_done = 0
        self.tokens = [list(prompt) for prompt in prompts]
        self.slots = list(range(len(prompts)))
        self.active = set(self.slots) if sampling.max_tokens else set()
        self.reasons: list[Reason] = ["length"] * len(prompts)

    @torch.inference_mode()
    def advance(self) -> dict[int, int | None]:
        """One more token for every active row; None for a row that came to a stop id."""
        logits_BV = self._read_new() if self._num_done else self._read_prompts()
        slots = [slot for slot, row in enumerate(self.slots) if row in self.active]
        rows = [self.slots[slot] for slot in slots]
        if len(slots) < len(self.slots):
            logits_BV = logits_BV[slots]
        ids_B = choose(logits_BV, sampling=self._sampling, draws_B=self._draws_BN[rows, self._num_done])
        self._num_done += 1
        chosen: dict[int, int | None] = {}
        for row, token in zip(rows, ids_B.tolist(), strict=True):
            stopped = token in self._sampling.stop_ids
            chosen[row] = None if stopped else token
            if stopped:
                self.reasons[row] = "stop"
            else:
                self.tokens[row].append(token)
            if stopped or self._num_done == self._sampling.max_tokens:
                self.active.remove(row)
        self._compact()
        return chosen

    def _read_prompts(self) -> Tensor:
        windows = [tokens[-self._context :] for tokens in self.tokens]
        counts = [len(window) for window in windows]
        padded = [window + [0] * (max(counts) - len(window)) for window in windows]
        return self._model.forward_cached(self._ids(padded), self._cache, counts=counts)

    def _read_new(self) -> Tensor:
        """Read the last token of every active row; a full row reads its last half again."""
        is_full = [length == self._context for length in self._cache.lengths]
        counts = [int(row in self.active and not full) for row, full in zip(self.slots, is_full, strict=True)]
        logits_BV: Tensor | None = None
        if any(counts):
            # Idle rows write where their next token would go; a full one has no such place, its old half goes anyway.
            self._cache.lengths = [
                min(length, self._cache.capacity - 1) if not count else length
                for length, count in zip(self._cache.lengths, counts, strict=True)
            ]
            ids_B1 = self._ids([[self.tokens[row][-1]] for row in self.slots])
            logits_BV = self._model.forward_cached(ids_B1, self._cache, counts=counts)
        for slot, full in enumerate(is_full):
            if full and self.slots[slot] in self.active:
                logits_1V = self._slide(slot)
                logits_BV = logits_1V.repeat(len(self.slots), 1) if logits_BV is None else logits_BV
                logits_BV[slot] = logits_1V[0]
        assert logits_BV is not None
        return logits_BV

    def _slide(self, slot: int) -> Tensor:
        """Read the last half context of a row again, from position 0."""
        half = max(self._context // 2, 1)
        cache = self._model.new_cache(1, half)
        logits_1V = self._model.forward_cached(self._ids([self.tokens[self.slots[slot]][-half:]]), cache)
        self._cache.k_LBHSD[:, slot, :, :half] = cache.k_LBHSD[:, 0]
        self._cache.v_LBHSD[:, slot, :, :half] = cache.v_LBHSD[:, 0]
        self._cache.lengths[slot] = half
        return logits_1V

    def _compact(self) -> None:
        """Drop the rows that have ended, once they are half of the cache (each copy of it halves it)."""
        if 0 < len(self.active) <= len(self.slots) // 2:
            slots = [slot for slot, row in enumerate(self.slots) if row in self.active]
            self._cache.keep(slots)
            self.slots = [self.slots[slot] for slot in slots]

    def _ids(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self._device)


def _check_prompts(prompts: list[list[int]], *, vocab_size: int) -> None:
    for prompt in prompts:
        if not prompt:
            raise ConfigError("a prompt has no tokens", hint="begin with the end-of-text token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ConfigError(
                "a prompt has tokens outside of the model's vocabulary of {tokens:,}",
                tokens=vocab_size,
                hint="use the tokenizer that the model was trained with",
            )
