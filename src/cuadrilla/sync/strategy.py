"""The seam of strategies: what `sync.kind` chooses, and all that the rest of the program knows of it.

    worker half   the passes of a lease → a contribution        on every worker, over its own model
    merge half    contributions → an update → the next version  on the coordinator, over the weights of record
    rounds        what is leased to whom, when a version is due  inside the coordinator (`work.py`)

The loop computes, a strategy never does; the link carries. A lease may hold many optimizer steps (`units_per_step`), a
contribution may be anything with names, shapes and number types of its own (`contribution_like`): a sum of gradients, a
difference of weights; it may come in pieces, and travel while the next lease is computed (`Streaming`), which
the strategy's rounds decide on. `tests/average.py` is a whole strategy of one short file, `tests/streaming.py` one that
does not wait.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cuadrilla.link.base import Contribution, Lease, Tensors
from cuadrilla.sync.outer import Outer
from cuadrilla.sync.work import Rounds, Share

OUTLIER_RATIO = 100.0
"""Sizes of honest contributions differ by much less, however few tokens one of them holds."""

Parameters = Mapping[str, nn.Parameter]


class Stepper(Protocol):
    """What a strategy needs of an optimizer."""

    def step(self, factor: float) -> None:
        """Update the parameters from their `.grad`, every learning rate times `factor`."""

    def state_tensors(self) -> dict[str, Tensor]: ...

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How parameters are updated, by whichever half does it: equal on all machines.

    `lr_factor` of the planned tokens up to a step, its own included. `clip_norm` 0: none. `make_outer` None: no outer
    optimizer. `unit_tokens`: planned tokens of a unit.
    """

    make_optimizer: Callable[[Parameters], Stepper]
    lr_factor: Callable[[int], float]
    clip_norm: float
    units_per_round: int
    unit_tokens: int
    make_outer: Callable[[Parameters], Outer] | None = None


@dataclass(kw_only=True)
class Sums:
    """What a worker has added up over a lease: summed loss, counted tokens, and whether everything was finite."""

    loss: float = 0.0
    tokens: int = 0
    valid: bool = True


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Of an update that was merged and not applied yet. `bad`: contributions that hold non-finite values."""

    norm: float
    tokens: int
    bad: tuple[int, ...] = ()


class WorkerHalf(Protocol):
    """Over a worker's model, whose parameters are those of the last version that was applied when a lease begins."""

    @property
    def params(self) -> Parameters:
        """What is trained."""

    @property
    def one_unit_per_micro_step(self) -> bool:
        """Whether passes must not be stacked out of several units."""

    @property
    def units_per_step(self) -> int:
        """A lease is cut into steps of this number of units (0: it is a single step), and `local_step` follows each."""

    def begin(self, lease: Lease) -> None:
        """A new lease, or the same one again: forget what was computed before."""

    def measuring(self) -> AbstractContextManager[None]:
        """Around each pass, forward and backward. Gradients are those of Σ loss / `lease.planned_tokens`."""

    def after_micro_step(self, sums: Sums) -> None:
        """A pass is done; `sums` holds its loss and tokens."""

    def local_step(self, sums: Sums) -> None:
        """All passes of a step are done."""

    def contribute(self) -> Tensors:
        """Those of the answer to the lease; they must stay untouched until the next `apply`."""

    def apply(self, version: Mapping[str, Tensor]) -> None:
        """Take over a committed version."""


@runtime_checkable
class Streaming(Protocol):
    """What a worker half has besides, if it computes the next lease while its answer travels.

    It is told of no version in the middle of a lease. What it hands out must stay untouched, although it goes on.
    """

    def piece(self, lease: Lease) -> Tensors:
        """After `local_step`: tensors of the answer that can travel already; `contribute` gives the others."""


class MergeHalf(Protocol):
    """Over the model of record. The order of its calls for a version: `reduce`, `update` (for the journal), `step`."""

    @property
    def params(self) -> Mapping[str, Tensor]:
        """What a version holds, by name: the tensors of record themselves."""

    def reduce(self, contributions: Sequence[Contribution], *, planned_tokens: int) -> Reduced:
        """Prepare the update; nothing else changes, and it may be prepared again from other contributions."""

    def sizes(self, contributions: Sequence[Contribution]) -> list[float]:
        """The norm of each, as far as honest ones are alike in it; 0 for one without tokens."""

    def zeros(self, contributions: Sequence[Contribution]) -> tuple[int, ...]:
        """Those with a loss that change nothing, beside others that do: a device that computes nothing, or data from
        which there is nothing to learn.
        """

    def can_hold(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Whether a contribution of `num_units` can hold these numbers, where that can be told from themselves."""

    def update(self) -> Mapping[str, Tensor]:
        """What was prepared, by name: the journal keeps it, and `load_update` brings it back."""

    def load_update(self, update: Mapping[str, Tensor]) -> None: ...

    def step(self, *, norm: float, tokens: int, version: int) -> float:
        """Apply what was prepared; the learning-rate factor. `tokens`: planned up to this version."""

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Everything besides the model that decides the next versions."""

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class Strategy(Protocol):
    """What `sync.kind` names.

    `max_staleness`: how many versions may be made between the one that a contribution is computed from and the one that
    it goes into; None where a round waits for all of its contributions. `moves_weights`: the worker half changes its
    model's parameters, which therefore are not those of record, not even alone.
    """

    @property
    def max_staleness(self) -> int | None: ...

    @property
    def moves_weights(self) -> bool: ...

    def worker(self, model: nn.Module, recipe: Recipe) -> WorkerHalf:
        """Raises TaskError for a model that it would train wrongly."""

    def merge(self, model: nn.Module, recipe: Recipe) -> MergeHalf: ...

    def rounds(self, *, share: Share) -> Rounds:
        """`share`: the planner."""

    def version_like(self, model: nn.Module) -> dict[str, Tensor]:
        """Names, dtypes and shapes of what a version holds; the values mean nothing."""

    def contribution_like(self, model: nn.Module) -> dict[str, Tensor]:
        """Those of a contribution's tensors, as they travel."""

    def check(self, model: nn.Module, *, several_workers: bool) -> None:
        """Raises TaskError for a model that it would train wrongly, before anything is trained."""


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


def changing_nothing(contributions: Sequence[Contribution], *, names: Sequence[str]) -> tuple[int, ...]:
    """See `MergeHalf.zeros`; `names` of the tensors to look at, those first in which a change is found soonest."""
    learned = [any(bool(item.tensors[name].any()) for name in names) for item in contributions]
    if not any(learned):
        return ()
    return tuple(i for i, item in enumerate(contributions) if item.tokens and item.loss_sum and not learned[i])


def unusable(
    contributions: Sequence[Contribution], *, norm: float, sizes: Callable[[], Sequence[float]]
) -> tuple[int, ...]:
    """Which contributions are to blame for an update of this norm; none for a finite one."""
    if math.isfinite(norm):
        return ()
    bad = tuple(i for i, item in enumerate(contributions) if not _all_finite(item))
    return bad or outliers(sizes()) or tuple(range(len(contributions)))


def _all_finite(contribution: Contribution) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in contribution.tensors.values())
