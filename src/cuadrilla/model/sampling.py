"""The choice of the next token from logits.

Letters in tensor names: B rows, V vocabulary, K tokens that may be chosen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cuadrilla.errors import ConfigError

MAX_PENALTY = 2.0
MIN_TEMPERATURE = MIN_PART = 1e-6
"""A lower temperature is greedy, and a lower top_p leaves one token: in fp32 either might be 0."""
MAX_DRAW = 1 - 2**-20
"""Upper bound of a random draw, so that the draw times the sum of a distribution stays below that sum."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 is greedy. top_k 0 and top_p 1 keep the whole distribution; top_k is applied first.

    As in OpenAI's API, penalties lower the logits of tokens that the row has generated: `presence_penalty` once for
    each such token, `frequency_penalty` once for each of its occurrences.
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
        """Raises ConfigError."""
        is_right = {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "max_tokens": self.max_tokens >= 0,
            "presence_penalty": abs(self.presence_penalty) <= MAX_PENALTY,
            "frequency_penalty": abs(self.frequency_penalty) <= MAX_PENALTY,
        }
        for name in (name for name, right in is_right.items() if not right):
            raise ConfigError(
                "{name} cannot be {value}",
                name=name,
                value=getattr(self, name),
                hint="top_p is in (0, 1], penalties in -2 to 2, the others 0 or more",
            )
        if not all(self.stop):
            raise ConfigError("a stop string is empty", hint="leave it out")


def choose(logits_BV: Tensor, *, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """One token id per row: the most likely one, or the one that the row's draw, uniform in [0, 1), selects."""
    if sampling.temperature < MIN_TEMPERATURE:
        return logits_BV.argmax(-1)
    # The largest logit is subtracted first: dividing by a tiny temperature then overflows to -inf, never to nan.
    p_BK = torch.softmax((logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature, -1)
    ids_BK = None
    if 0 < sampling.top_k < p_BK.shape[-1]:
        p_BK, ids_BK = p_BK.topk(sampling.top_k)
        p_BK = p_BK / p_BK.sum(-1, keepdim=True)
    if sampling.top_p < 1:
        if ids_BK is None:
            p_BK, ids_BK = p_BK.sort(dim=-1, descending=True, stable=True)
        p_BK = p_BK.masked_fill(p_BK.cumsum(-1) - p_BK >= max(sampling.top_p, MIN_PART), 0.0)
    cumulative_BK = p_BK.cumsum(-1)
    targets_B1 = draws_B[:, None] * cumulative_BK[:, -1:]
    choice_B1 = torch.searchsorted(cumulative_BK, targets_B1, right=True)
    return (choice_B1 if ids_BK is None else ids_BK.gather(1, choice_B1))[:, 0]
