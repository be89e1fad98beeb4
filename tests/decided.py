"""GPT-2s whose weights are far from their initial values: no bias is 0, and no gain is 1."""

from typing import Any

import torch

from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.inference import InferenceModel


def spread_gpt2(spread: float, **shape: Any) -> GPT2:
    """With 0.3 the best token leads by far, rounding decides nothing, and a text does not settle into one token."""
    torch.manual_seed(0)
    made = GPT2(GPT2Config(**shape)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return made


def decided_model(*, vocabulary: int, context: int) -> InferenceModel:
    """Ready to generate."""
    return InferenceModel(spread_gpt2(0.3, vocab_size=vocabulary, context=context, layers=2, heads=4, width=32))
