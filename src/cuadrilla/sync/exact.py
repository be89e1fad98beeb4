"""The worker half of exact synchronous training: any number of unequal workers give the result of one worker.

    worker:  for each leased unit: grad += d(loss sum / planned tokens)        `after_micro_step`, `contribute`
    merge:   grad = (Σ contributions) · planned / Σ tokens                     `reduce` in `merge.py`
             clip by global norm, optimizer step at lr(step)                   `step`
             send the weights θ to every worker                                `version`, `apply`

The merge adds sums, not means, so every token has the same weight, whatever the shares and the sequence lengths are.
Ordinary data-parallel training is the special case of equal shares. In fp32 the result differs from one machine's only
by the order of additions (≤ 1e-6 relative). Running statistics (BatchNorm): see `sync/statistics.py`.

*Strict*: each unit's gradient becomes int64 fixed point before any addition, so the sum does not depend on order or
split. The weights then have the same SHA-256 for any number of workers, any split and any faults. One unit is one
pass. Threads, torch build and device kind must be equal (the coordinator refuses machines that differ).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cuadrilla.link.base import Lease, Tensors
from cuadrilla.sync.statistics import UnitStatistics, statistics_of, sums_like
from cuadrilla.sync.strategy import GRADIENT, Forms, Parameters, Sums, trainable

FIXED_POINT_SCALE = float(2**40)
"""Strict gradients are integer multiples of 2^-40. In 62 bits that leaves room for values up to 2^22, and an element of
a mean loss's gradient rarely exceeds 1."""
FIXED_POINT_LIMIT = float(2**62)


class ExactWorker:
    """The worker half, and the base of others. When a lease begins, the model has the parameters of the last version
    applied. Raises TaskError for a model whose running statistics cannot be merged.

    `params`: the trainable parameters. `one_unit_per_micro_step`: each pass is one unit; else it may stack them.
    """

    def __init__(self, model: nn.Module, *, strict: bool = False) -> None:
        self.params: Parameters = trainable(model)
        self._statistics = UnitStatistics(model)
        self.one_unit_per_micro_step = strict or bool(self._statistics.record)  # BatchNorm normalises over one unit
        self._strict = strict
        self._fixed: dict[str, Tensor] = {}

    def begin(self, lease: Lease) -> None:
        """Start a lease, or the same lease again: forget what was computed since the last version."""
        del lease
        self._statistics.begin()
        for parameter in self.params.values():
            parameter.grad = None
        # Not zeroed in place: an earlier answer of this round may still be waiting for its merge.
        self._fixed = {
            name: torch.zeros(parameter.shape, dtype=torch.int64, device=device_of_double(parameter.device))
            for name, parameter in self.params.items()
            if self._strict
        }

    def after_micro_step(self, sums: Sums) -> None:
        """Called after each pass, whose loss and tokens are in `sums`; `.grad` is that of Σ loss / planned tokens. Add
        the pass's statistics. Strict: move its gradient into the fixed-point sum."""
        if not self._statistics.add():
            sums.valid = False
        if not self._strict:
            return
        for name, parameter in self.params.items():
            if parameter.grad is None:
                continue
            scaled = as_double(parameter.grad).mul_(FIXED_POINT_SCALE).round_()
            if not bool(scaled.abs().max() < FIXED_POINT_LIMIT):  # also False for NaN
                sums.valid = False
            else:
                self._fixed[name].add_(scaled.to(torch.int64))
            parameter.grad = None

    def local_step(self, sums: Sums) -> None:
        """Called after all passes of each of the lease's optimizer steps. Here the merge half runs the optimizer."""

    def contribute(self) -> Tensors:
        """The tensors of the contribution. They must not change until the next `apply`."""
        if self._strict:  # also zeros for what no pass has reached, as in a lease without units
            gradients = {GRADIENT + name: total for name, total in self._fixed.items()}
        else:
            own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.params.items()}
            gradients = {GRADIENT + name: gradient for name, gradient in own.items()}
        return {**gradients, **self._statistics.sums}

    def apply(self, version: Mapping[str, Tensor]) -> None:
        """Load a committed version."""
        with torch.no_grad():
            for name, tensor in {**self.params, **self._statistics.record}.items():
                source = version[name]
                if source is not tensor:
                    tensor.copy_(source)


def exact_forms(model: nn.Module, *, strict: bool) -> Forms:
    """A version: trainable parameters and running statistics. A contribution: Σ gradient / planned tokens (fp32;
    strict: int64 fixed point) and Σ statistics.
    """
    params, dtype = trainable(model), torch.int64 if strict else None
    gradients = {GRADIENT + name: torch.empty_like(p, dtype=dtype, device="meta") for name, p in params.items()}
    return Forms(version={**params, **statistics_of(model)}, contributions=({**gradients, **sums_like(model)},))


def as_double(tensor: Tensor) -> Tensor:
    """The tensor as float64."""
    return tensor.to(device_of_double(tensor.device)).double()


def device_of_double(device: torch.device) -> torch.device:
    """The device for the float64 form of tensors on `device`: that one, or the CPU, since MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" else device
