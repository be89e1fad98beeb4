"""The interface of strategies: what `sync.kind` chooses, and all that the rest of the program knows of it.

    worker half   the passes of a lease → a contribution        on every worker, over its own model
    merge half    contributions → an update → the next version  on the coordinator, over the weights of record
    rounds        what is leased to whom, when a version is due  inside the coordinator (`work.py`)

The loop computes, a strategy never does; the link carries. A lease may hold many optimizer steps (`Lease.steps`),
and a contribution or a version may be anything with names, shapes and number types of its own: sums of gradients,
differences of weights, an optimizer's state.

Invariant: a contribution is a function of the last version applied and of the units of its lease. A worker half keeps
nothing else, so any worker can compute any lease, again and elsewhere.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from cuadrilla.link.base import Contribution, Lease, Tensors
from cuadrilla.sync.events import Answer
from cuadrilla.sync.work import Rounds

OUTLIER_RATIO = 100.0
"""Sizes of honest contributions differ by much less, however few tokens one of them holds."""

Parameters = Mapping[str, nn.Parameter]


class Stepper(Protocol):
    """What a strategy needs of an optimizer."""

    def start(self) -> None:
        """Make the state of all parameters now, of zeros; else each begins with its first gradient."""

    @property
    def adaptive(self) -> frozenset[str]:
        """Names of parameters whose steps are divided by the root of a mean of squared gradients."""

    def step(self, factor: float, *, squares: Mapping[str, Tensor] | None = None) -> None:
        """Update the parameters that have a `.grad`, every learning rate times `factor`. `squares`: of gradients, in
        place of the square of `.grad`, for each of `adaptive`.
        """

    def state_tensors(self) -> dict[str, Tensor]: ...

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How parameters are updated, by whichever half does it: equal on all machines.

    From the sections `optim` and `schedule` (`train/setup.py`). `lr_factor(step)` multiplies each learning rate; the
    run's steps count from 1. `clip_norm` 0: none.
    """

    make_optimizer: Callable[[Parameters], Stepper]
    lr_factor: Callable[[float], float]
    clip_norm: float


@dataclass(kw_only=True)
class Sums:
    """What a worker has added up over a lease: summed loss, counted tokens, and whether everything was finite."""

    loss: float = 0.0
    tokens: int = 0
    valid: bool = True


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """An update that was merged and not applied yet. `bad`: indices of answers that cannot be used."""

    norm: float
    bad: tuple[int, ...] = ()


class WorkerHalf(Protocol):
    """Over a worker's model, whose parameters are those of the last version that was applied when a lease begins."""

    @property
    def params(self) -> Parameters:
        """What is trained."""

    @property
    def one_unit_per_micro_step(self) -> bool:
        """Whether passes must not be stacked out of several units."""

    def begin(self, lease: Lease) -> None:
        """A new lease, or the same one again: forget what was computed before."""

    def collecting_statistics(self) -> AbstractContextManager[None]:
        """Around each pass, forward and backward: running statistics (BatchNorm) are noted, not changed."""

    def after_micro_step(self, sums: Sums) -> None:
        """A pass is done; `sums` holds its loss and tokens. Gradients are those of Σ loss / `lease.planned_tokens`."""

    def local_step(self, sums: Sums) -> None:
        """All passes of one of the lease's steps are done."""

    def contribute(self) -> Tensors:
        """The tensors of its contribution, which must stay untouched until the next `apply`."""

    def apply(self, version: Mapping[str, Tensor]) -> None:
        """Take over a committed version."""


class MergeHalf(Protocol):
    """Over the model of record. The order of its calls for a version: `reduce`, `update` (for the journal), `step`."""

    def version(self, *, steps: int) -> Mapping[str, Tensor]:
        """What a version holds as it travels, by name, before a round of so many steps; tensors of record themselves
        where they need no other form.
        """

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> Reduced:
        """Prepare the update from contributions; the weights stay, and it may be prepared again from others."""

    def norms(self, answers: Sequence[Answer]) -> list[float]:
        """Norms that are comparable between honest contributions; 0 for one without tokens."""

    def is_plausible(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Whether a contribution of `num_units` can hold these numbers, where that can be told from themselves."""

    def update(self) -> Mapping[str, Tensor]:
        """What was prepared, by name: the journal keeps it, and `load_update` brings it back."""

    def load_update(self, update: Mapping[str, Tensor], *, steps: int) -> None: ...

    def step(self, *, norm: float, version: int, steps: int) -> float:
        """Apply the prepared update: `steps` optimizer steps, ending at `version`; the last one's rate factor."""

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Everything besides the model that decides the next versions."""

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class Strategy(Protocol):
    """What `sync.kind` names.

    `moves_weights`: the worker half changes its model's parameters, which therefore are not those of record, not even
    alone.
    """

    @property
    def moves_weights(self) -> bool: ...

    def worker(self, model: nn.Module, recipe: Recipe) -> WorkerHalf:
        """Raises TaskError for a model that it would train wrongly."""

    def merge(self, model: nn.Module, recipe: Recipe) -> MergeHalf: ...

    def rounds(self) -> Rounds: ...

    def versions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        """Names, dtypes and shapes of what a version may hold; the values mean nothing."""

    def contributions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        """Those of a contribution's tensors, as they travel."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name. Frozen ones (`requires_grad` False) are never moved nor changed."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def outliers(sizes: Sequence[float]) -> tuple[int, ...]:
    """Contributions whose size is beyond comparison with the others': a flipped bit, most likely."""
    found = []
    for index, size in enumerate(sizes):
        others = [other for i, other in enumerate(sizes) if i != index and other > 0]
        if others and size > OUTLIER_RATIO * statistics.median(others):
            found.append(index)
    return tuple(found)


def unusable(answers: Sequence[Answer], *, norm: float, norms: Callable[[], Sequence[float]]) -> tuple[int, ...]:
    """Which contributions are to blame for an update of this norm; none for a finite one."""
    if math.isfinite(norm):
        return ()
    bad = tuple(i for i, answer in enumerate(answers) if not _all_finite(answer.contribution))
    return bad or outliers(norms()) or tuple(range(len(answers)))


def _all_finite(contribution: Contribution) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in contribution.tensors.values())
