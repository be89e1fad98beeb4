"""How fast a language model can be trained here, before it is: a few passes of it on one core, or on the device."""

import statistics
import time

import torch

from cuadrilla.config import ModelSection
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import shape_of
from cuadrilla.train.precision import choose_device, choose_precision

WARM_PASSES, MEASURED_PASSES = 2, 7


def passes_per_second(section: ModelSection, *, tokens: int, batch: int) -> float:
    """Forward and backward passes over `batch` whole sequences, with a vocabulary of this size: the median."""
    device = choose_device("auto")
    model = GPT2(shape_of(section, tokens=tokens)).to(device)
    choose_precision("auto", device=device).apply(model)
    ids = torch.randint(tokens, (batch, model.config.context), device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 1 / statistics.median([_seconds(model, ids) for _ in range(WARM_PASSES + MEASURED_PASSES)][WARM_PASSES:])
    finally:
        torch.set_num_threads(threads)


def _seconds(model: GPT2, ids: torch.Tensor) -> float:
    began = time.monotonic()
    loss = model.loss(ids, ids)
    torch.autograd.backward([loss])
    float(loss.detach())  # waits for a GPU
    return time.monotonic() - began
