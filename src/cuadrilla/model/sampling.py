"""How the next token is chosen from logits.

Letters in tensor names: B rows, V vocabulary, K of its tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cuadrilla.errors import ConfigError

MOST_PENALTY = 2.0
LEAST_TEMPERATURE = LEAST_PART = 1e-6
"""Below, a temperature is greedy, and a part of the distribution one token: in fp32 both might be 0."""
DRAWS_AT_ONCE = 64
MOST_DRAW = 1 - 2**-20
"""So that a draw times the total of a distribution stays below the total."""
SEEDS, SEEDS_OF_TORCH = 2**64, 2**32


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole (top_k acts first).

    Penalties lower the logits of what a row has generated already: once for each token that occurs, and once for each
    time that it does, as in OpenAI's API.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

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
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_PENALTY:
                hint = "use 0 for none"
                raise ConfigError("{name} is not in -2 to 2", name=name, hint=hint)
        if not all(self.stop):
            raise ConfigError("a stop string is empty", hint="leave it out")


def draws(seed: int) -> Iterator[float]:
    """Uniform random numbers in [0, 1), without end; every of the seed's 64 bits counts.

    torch's generator looks at the lower 32 bits of a seed only. Beyond them Python's draws, whose numbers are promised
    to stay the same: https://docs.python.org/3/library/random.html#notes-on-reproducibility.
    """
    if 0 <= seed < SEEDS_OF_TORCH:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from torch.rand(DRAWS_AT_ONCE, generator=generator).clamp_(max=MOST_DRAW).tolist()
    chance = random.Random(seed % SEEDS)
    while True:
        yield min(chance.random(), MOST_DRAW)


def choose(logits_BV: Tensor, *, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """One id per row: the best, or the one that a uniform number in [0, 1) picks from the distribution."""
    if sampling.temperature < LEAST_TEMPERATURE:
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
        p_BK = p_BK.masked_fill(p_BK.cumsum(-1) - p_BK >= max(sampling.top_p, LEAST_PART), 0.0)
    cumulative_BK = p_BK.cumsum(-1)
    targets_B1 = draws_B[:, None] * cumulative_BK[:, -1:]
    choice_B1 = torch.searchsorted(cumulative_BK, targets_B1, right=True)
    return (choice_B1 if ids_BK is None else ids_BK.gather(1, choice_B1))[:, 0]
