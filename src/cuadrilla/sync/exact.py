"""Exact synchronous training: any number of unequal workers give the result of one worker.

    worker:  for each leased unit: grad += d(loss sum / planned tokens)        `after_micro_step`, `contribute`
    merge:   grad = (Σ contributions) · planned / Σ tokens                     `reduce`
             clip by global norm, optimizer step at lr(step)                   `step`
             send the weights θ to every worker                                `version`, `apply`

The merge adds sums, not means, so every token has the same weight, whatever the shares and the sequence lengths are.
Ordinary data-parallel training is the special case of equal shares. In fp32 the result differs from one machine's only
by the order of additions (≤ 1e-6 relative). Running statistics (BatchNorm): see `sync/statistics.py`.

*Strict*: each unit's gradient becomes int64 fixed point before any addition, so the sum does not depend on order or
split. The weights then have the same SHA-256 for any number of workers, any split and any faults. One unit is one
pass. Threads, torch build and device kind must be equal (the coordinator refuses machines that differ).

A worker that trains alone shares the coordinator's parameter tensors: nothing is copied.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cuadrilla.link.base import Lease, Tensors
from cuadrilla.sync.events import Answer
from cuadrilla.sync.statistics import MergedStatistics, UnitStatistics, statistics_of, sums_like
from cuadrilla.sync.strategy import (
    Parameters,
    Recipe,
    Reduced,
    Sums,
    trainable,
    unusable,
)
from cuadrilla.sync.work import Rounds

FIXED_POINT_SCALE = float(2**40)
"""Strict gradients are integer multiples of 2^-40. In 62 bits that leaves room for values up to 2^22, and an element of
a mean loss's gradient rarely exceeds 1."""
FIXED_POINT_LIMIT = float(2**62)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The strategy of `sync.kind = "exact"`; the module docstring explains it."""

    strict: bool = False
    moves_weights: bool = False

    def worker(self, model: nn.Module, recipe: Recipe) -> "ExactWorker":
        del recipe
        return ExactWorker(model, strict=self.strict)

    def merge(self, model: nn.Module, recipe: Recipe) -> "ExactMerge":
        return ExactMerge(model, recipe, strict=self.strict)

    def rounds(self) -> Rounds:
        return Rounds()

    def versions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        """A version's trainable parameters and running statistics."""
        del recipe
        return ({**trainable(model), **statistics_of(model)},)

    def contributions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        """A contribution's Σ gradient / planned tokens (fp32; strict: int64 fixed point) and Σ statistics."""
        del recipe
        dtype = torch.int64 if self.strict else None
        gradients = {name: torch.empty_like(p, dtype=dtype, device="meta") for name, p in trainable(model).items()}
        return ({**gradients, **sums_like(model)},)


class ExactWorker:
    """The worker half. Raises TaskError for a model whose running statistics cannot be merged."""

    def __init__(self, model: nn.Module, *, strict: bool) -> None:
        self.params: Parameters = trainable(model)
        self._statistics = UnitStatistics(model, strict=strict)
        self.one_unit_per_micro_step = strict or bool(self._statistics)  # BatchNorm normalises over one unit
        self._strict = strict
        self._fixed: dict[str, Tensor] = {}

    def begin(self, lease: Lease) -> None:
        """Start a lease: forget the gradients of the last one."""
        del lease
        self._statistics.begin()
        for parameter in self.params.values():
            parameter.grad = None
        self._fixed = {}  # not zeroed in place: an earlier answer of this round may still be waiting for its merge

    def collecting_statistics(self) -> AbstractContextManager[None]:
        return self._statistics.collecting_statistics()

    def after_micro_step(self, sums: Sums) -> None:
        """Add the pass's statistics. Strict: move its gradient into the fixed-point sum."""
        if not self._statistics.add():
            sums.valid = False
        if not self._strict:
            return
        for name, parameter in self.params.items():
            total = self._fixed_sum(name)
            if parameter.grad is None:
                continue
            scaled = _double(parameter.grad).mul_(FIXED_POINT_SCALE).round_()
            if not bool(scaled.abs().max() < FIXED_POINT_LIMIT):  # also False for NaN
                sums.valid = False
            else:
                total.add_(scaled.to(torch.int64))
            parameter.grad = None

    def local_step(self, sums: Sums) -> None:
        """Does nothing: the merge half runs the optimizer."""

    def contribute(self) -> Tensors:
        if self._strict:  # also zeros for what no pass has reached, as in a lease without units
            gradients = {name: self._fixed_sum(name) for name in self.params}
        else:
            gradients = {name: _gradient(parameter) for name, parameter in self.params.items()}
        return {**gradients, **self._statistics.tensors}

    def _fixed_sum(self, name: str) -> Tensor:
        if name not in self._fixed:
            parameter = self.params[name]
            place = _place_of_double(parameter)
            self._fixed[name] = torch.zeros(parameter.shape, dtype=torch.int64, device=place)
        return self._fixed[name]

    def apply(self, version: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in {**self.params, **self._statistics.record}.items():
                source = version[name]
                if source is not tensor:
                    tensor.copy_(source)


class ExactMerge:
    """The merge half. It owns the optimizer, and its model is the model of record."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, strict: bool) -> None:
        self._params = trainable(model)
        self._recipe = recipe
        self._statistics = MergedStatistics(model)
        self._optimizer = recipe.make_optimizer(self._params)
        self._strict = strict

    def version(self, *, steps: int) -> Mapping[str, Tensor]:
        """A version's trainable parameters and running statistics."""
        del steps
        return {**self._params, **self._statistics.record}

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> Reduced:
        """Put the weighted mean gradient into `.grad`, and compute the mean statistics. Nothing else changes.

        Contributions are added in the order of `answers`.
        """
        tokens = sum(answer.contribution.tokens for answer in answers)
        contributions = [answer.contribution.tensors for answer in answers]
        self._sum(contributions)
        self._statistics.reduce(contributions)
        if tokens != planned_tokens:
            for gradient in self._gradients():
                gradient.mul_(planned_tokens / max(tokens, 1))
        norm = float(torch.nn.utils.get_total_norm(self._gradients()))
        bad = unusable(answers, norm=norm, norms=lambda: self.norms(answers))
        return Reduced(norm=norm, bad=bad)

    def norms(self, answers: Sequence[Answer]) -> list[float]:
        """The gradient norm of each contribution, divided by its tokens; 0 without tokens."""
        return [
            float(torch.nn.utils.get_total_norm([_double(item.tensors[name]) for name in self._params])) / item.tokens
            if item.tokens
            else 0.0
            for item in (answer.contribution for answer in answers)
        ]

    def is_plausible(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Whether `num_units` units can have these running statistics. Impossible ones would stay in the model."""
        return self._statistics.can_be(tensors, num_units=num_units)

    def step(self, *, norm: float, version: int, steps: int) -> float:
        """Clip, update parameters and statistics, and return the learning-rate factor."""
        del steps
        clip_norm = self._recipe.clip_norm
        if clip_norm and norm > clip_norm:
            for gradient in self._gradients():
                gradient.mul_(clip_norm / norm)
        factor = self._recipe.lr_factor(version)
        self._optimizer.step(factor)
        self._statistics.step()
        return factor

    def update(self) -> dict[str, Tensor]:
        """The merged gradient and the mean statistics, by name."""
        return {**{name: _gradient(parameter) for name, parameter in self._params.items()}, **self._statistics.mean}

    def load_update(self, update: Mapping[str, Tensor], *, steps: int) -> None:
        del steps
        for name, parameter in self._params.items():
            parameter.grad = update[name].to(device=parameter.device, dtype=parameter.dtype)
        self._statistics.mean = {name: tensor for name, tensor in update.items() if name not in self._params}

    def state_tensors(self) -> dict[str, Tensor]:
        return self._optimizer.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._optimizer.load_state_tensors(tensors)

    def _sum(self, contributions: Sequence[Tensors]) -> None:
        for name, parameter in self._params.items():
            place = contributions[0][name].device if self._strict else parameter.device
            total = contributions[0][name].to(place)
            if len(contributions) > 1:
                total = total.clone()  # a contribution stays as it is: the merge may have to be repeated
            for item in contributions[1:]:
                total.add_(item[name].to(place))
            if self._strict:
                total = _double(total).div_(FIXED_POINT_SCALE).to(parameter.dtype).to(parameter.device)
            parameter.grad = total

    def _gradients(self) -> list[Tensor]:
        return [_gradient(parameter) for parameter in self._params.values()]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _double(tensor: Tensor) -> Tensor:
    """The tensor as float64."""
    return tensor.to(_place_of_double(tensor)).double()


def _place_of_double(tensor: Tensor) -> torch.device:
    """The device for a tensor's float64 form: its own, or the CPU, since MPS has no float64."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
