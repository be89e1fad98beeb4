"""Exact synchronous training: k unequal workers give the result of one.

    worker:  for each leased unit: grad += d(loss sum / planned tokens)        `after_micro_step`, `contribute`
    merge:   grad = (Σ contributions) · planned / Σ tokens                     `reduce`
             clip by global norm, optimizer step at lr(step)                   `step`
             θ to everyone                                                     `apply`

Because sums are merged, not means, unequal shares and ragged lengths weigh as they should; ordinary data-parallel
training is the special case of equal shares. In fp32 the result differs from one machine's only by the order of
additions (≤ 1e-6 relative). Running statistics (BatchNorm): see `sync/statistics.py`.

*Strict*: the gradient of each unit becomes an int64 fixed-point number before any addition, so that the sum does not
depend on order or split, and the weights have the same SHA-256 for any number of workers, any split, any faults.
One unit is one pass; threads, torch build and device kind must be equal (the coordinator refuses others).

Alone, the worker's parameters and the coordinator's are the same tensors: nothing is copied.
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
"""Gradients of a mean loss rarely exceed 1 per element: 2^-40 of resolution leaves 2^22 of room in 62 bits."""
FIXED_POINT_LIMIT = float(2**62)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The strategy of `sync.kind = "exact"`; see the module."""

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
        """Trainable parameters and running statistics."""
        del recipe
        return ({**trainable(model), **statistics_of(model)},)

    def contributions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        """Σ gradient / planned tokens (fp32; strict: int64 fixed point) and Σ statistics."""
        del recipe
        dtype = torch.int64 if self.strict else None
        gradients = {name: torch.empty_like(p, dtype=dtype, device="meta") for name, p in trainable(model).items()}
        return ({**gradients, **sums_like(model)},)


class ExactWorker:
    """The worker half. Raises TaskError for a model whose running statistics cannot be merged."""

    def __init__(self, model: nn.Module, *, strict: bool) -> None:
        self.params: Parameters = trainable(model)
        self._statistics = UnitStatistics(model, strict=strict)
        self.one_unit_per_micro_step = strict or bool(self._statistics)  # a module normalises over a unit
        self._strict = strict
        self._fixed: dict[str, Tensor] = {}

    def begin(self, lease: Lease) -> None:
        """A new lease: forget the gradients of the last one."""
        del lease
        self._statistics.begin()
        for parameter in self.params.values():
            parameter.grad = None
        self._fixed = {}  # not zeroed in place: an earlier answer of this round may still be waiting for its merge

    def collecting_statistics(self) -> AbstractContextManager[None]:
        """Around a pass, forward and backward: running statistics of record stay as they are."""
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
        """The merge half steps, not this one."""

    def contribute(self) -> Tensors:
        """The tensors of its contribution, which must stay untouched until the next `apply`."""
        if self._strict:  # all of them also for a lease without units
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
        """Take over a committed version."""
        with torch.no_grad():
            for name, tensor in {**self.params, **self._statistics.record}.items():
                source = version[name]
                if source is not tensor:
                    tensor.copy_(source)


class ExactMerge:
    """The merge half: owns the optimizer; its model's parameters and running statistics are those of record."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, strict: bool) -> None:
        self._params = trainable(model)
        self._recipe = recipe
        self._statistics = MergedStatistics(model)
        self._optimizer = recipe.make_optimizer(self._params)
        self._strict = strict

    def version(self, *, steps: int) -> Mapping[str, Tensor]:
        """What a version holds: trainable parameters, and running statistics."""
        del steps
        return {**self._params, **self._statistics.record}

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> Reduced:
        """Put the weighted mean gradient into `.grad`, and take the mean of the statistics; nothing else changes.

        The order of answers is theirs.
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
        """The norm of each one's gradient per token; 0 for one without tokens."""
        return [
            float(torch.nn.utils.get_total_norm([_double(item.tensors[name]) for name in self._params])) / item.tokens
            if item.tokens
            else 0.0
            for item in (answer.contribution for answer in answers)
        ]

    def is_plausible(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Whether these can be the running statistics of so many units: whatever else is wrong with them, they stay."""
        return self._statistics.can_be(tensors, num_units=num_units)

    def step(self, *, norm: float, version: int, steps: int) -> float:
        """Clip, update parameters and statistics and return the learning-rate factor."""
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
        """The merged gradient and mean statistics by name."""
        return {**{name: _gradient(parameter) for name, parameter in self._params.items()}, **self._statistics.mean}

    def load_update(self, update: Mapping[str, Tensor], *, steps: int) -> None:
        del steps
        for name, parameter in self._params.items():
            parameter.grad = update[name].to(device=parameter.device, dtype=parameter.dtype)
        self._statistics.mean = {name: tensor for name, tensor in update.items() if name not in self._params}

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything besides the parameters that decides the next versions."""
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
    """A copy in float64."""
    return tensor.to(_place_of_double(tensor)).double()


def _place_of_double(tensor: Tensor) -> torch.device:
    """Where it can be in float64: on its device, but for MPS, which has none."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
