"""What a processor computes our GPT-2 with: a rule, whose figures `bench/kernels.py` prints.

Products in fp32 by oneDNN on AMD's processors, elsewhere by what torch calls (MKL on x86). Passes of 2,048 tokens:
longer ones take more memory, and the worker would answer later. In bf16 each pass casts the weights, and of passes of
4,096 tokens a token takes 8 % less time on an Intel Xeon with AMX, but more on an AMD EPYC.
"""

from dataclasses import dataclass

import torch
from torch import nn

from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.kernels import is_amd

PASS_TOKENS, LONG_PASS_TOKENS = 2048, 4096
LARGEST_WIDTH = 512
"""Wider models have long passes as it is."""


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """`onednn`: products in fp32 by oneDNN. `pass_tokens`: the most of a pass. `reason` is "" where none was chosen."""

    onednn: bool = True
    reason: str = ""
    pass_tokens: int = PASS_TOKENS

    def __str__(self) -> str:
        library = Message("oneDNN") if self.onednn else Message("torch's library")
        return Message("fp32 products by {library} ({reason})", library=library, reason=self.reason)


def choose_kernels(model: nn.Module, *, device: torch.device, dtype: torch.dtype, strict: bool) -> KernelChoice:
    """Have `model` compute with what is usually the fastest here. Strict mode: oneDNN, on all machines alike."""
    if not isinstance(model, GPT2) or device.type != "cpu":
        return KernelChoice()
    if dtype != torch.float32:
        is_long = dtype == torch.bfloat16 and model.config.width <= LARGEST_WIDTH and not (strict or is_amd())
        return KernelChoice(pass_tokens=LONG_PASS_TOKENS if is_long else PASS_TOKENS)
    reason = Message("strict mode") if strict else Message("AMD") if is_amd() else Message("not AMD")
    choice = KernelChoice(onednn=strict or is_amd(), reason=reason)
    model.use(onednn=choice.onednn)
    return choice
