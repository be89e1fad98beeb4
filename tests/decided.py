"""GPT-2s whose weights are far from their initial values: no bias is 0, and no gain is 1."""

from typing import Any

import torch

from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.inference import InferenceModel


def spread_gpt2(spread: float, **shape: Any) -> GPT2:
    """A GPT-2 with random weights. With a spread of 0.3 the best token leads by so much that rounding does not change
    it, and a generated text does not repeat one token for ever."""
    torch.manual_seed(0)
    made = GPT2(GPT2Config(**shape)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return made


def decided_model(*, vocabulary: int, context: int) -> InferenceModel:
    return InferenceModel(spread_gpt2(0.3, vocab_size=vocabulary, context=context, layers=2, heads=4, width=32))
