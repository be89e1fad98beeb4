"""Windows: several optimizer steps on each machine, then one merge of the weights and of the optimizer's state.

    worker:  from the state of record, for each step of its lease: θ ← step(θ, mean gradient)        `local_step`
             contribution = (θ − θ of record, the optimizer's state)                                 `contribute`
    merge:   means by tokens of all contributions                                                    `reduce`
             θ += the mean change; the mean state is that of record                                  `step`
             θ and the state to everyone                                                             `version`

A round is a window of `steps` steps of the whole crew. A worker's lease is its lane: in each of these steps as many
units as its speed allows, so that all lanes take equally many steps and a mean by tokens weighs each unit alike.
Learning rates depend on the run's tokens, whoever counted them. The state of record is whole: a worker keeps nothing
between two leases, whoever joins starts with everything, and a lost lane is computed again by anybody. It is also what
learns best (`python -m bench.lanes`, docs/experiments.md): a lane that starts with the crew's momentum goes on, where
one that starts with its own, or with none, has to find its way first.

With one step of plain gradient descent it is the exact strategy.

*Strict*: lanes are cut before it is known who computes them (`lanes.py`), a pass is a unit, and the merge adds lanes up
in their order. The weights then have one SHA-256 for any number of workers and any faults.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cuadrilla.errors import TaskError
from cuadrilla.link.base import Lease, Tensors
from cuadrilla.sync.events import Answer
from cuadrilla.sync.lanes import LaneRounds
from cuadrilla.sync.statistics import statistics_of
from cuadrilla.sync.strategy import (
    Parameters,
    Recipe,
    Reduced,
    Sums,
    trainable,
    unusable,
    without_effect,
)
from cuadrilla.sync.work import Rounds, Share, WholeRounds

STATE = "optimizer state: "
"""Before the names of the optimizer's tensors, beside the names of weights."""
SECOND_MOMENT = "exp_avg_sq."


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The strategy of `sync.kind = "windows"`; see the module. `strict_lanes`: their relative sizes, in strict mode."""

    steps_per_round: int
    strict_lanes: Sequence[float] = ()
    moves_weights: bool = True

    def worker(self, model: nn.Module, recipe: Recipe) -> "WindowsWorker":
        return WindowsWorker(model, recipe, steps_per_round=self.steps_per_round, strict=bool(self.strict_lanes))

    def merge(self, model: nn.Module, recipe: Recipe) -> "WindowsMerge":
        return WindowsMerge(model, recipe)

    def rounds(self, *, share: Share) -> Rounds:
        return LaneRounds(share=share, sizes=self.strict_lanes) if self.strict_lanes else WholeRounds(share=share)

    def version_like(self, model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
        """Trainable parameters and the optimizer's state."""
        params = {name: nn.Parameter(torch.empty_like(p, device="meta")) for name, p in trainable(model).items()}
        optimizer = recipe.make_optimizer(params)
        optimizer.start()
        return {**params, **_named(optimizer.state_tensors())}

    def contribution_like(self, model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
        """Changes of the parameters, and the optimizer's state."""
        return self.version_like(model, recipe)


class WindowsWorker:
    """The worker half. Raises TaskError for a model with running statistics, which are no weights."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, steps_per_round: int, strict: bool) -> None:
        if statistics_of(model):
            raise TaskError(
                "windows do not merge the running statistics of BatchNorm",
                hint='sync.kind = "exact" does; or a model with LayerNorm or GroupNorm',
            )
        self.params: Parameters = trainable(model)
        self.steps_per_round, self.one_unit_per_micro_step = steps_per_round, strict
        self._recipe = recipe
        self._optimizer = recipe.make_optimizer(self.params)
        self._record: dict[str, Tensor] = {}
        self._begun = self._planned = self._counted = self._steps = 0

    @torch.no_grad()
    def begin(self, lease: Lease) -> None:
        """From the state of record, whatever was computed before."""
        for name, parameter in self.params.items():
            parameter.copy_(self._record[name])
            parameter.grad = None
        self._optimizer.load_state_tensors(_state_in(self._record))
        self._begun, self._planned = lease.version * lease.planned_tokens, lease.planned_tokens
        self._counted = self._steps = 0

    def collecting_statistics(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_micro_step(self, sums: Sums) -> None:
        """Gradients add up by themselves."""

    def local_step(self, sums: Sums) -> None:
        """A step of the run's optimizer with the mean gradient of this lane; none where nothing was counted."""
        self._steps += 1
        tokens, self._counted = sums.tokens - self._counted, sums.tokens
        if not tokens:
            return
        for parameter in self.params.values():
            if parameter.grad is not None:
                parameter.grad.mul_(self._planned / tokens)
        norm = nn.utils.clip_grad_norm_(self.params.values(), self._recipe.clip_norm or float("inf"))
        sums.valid = sums.valid and bool(torch.isfinite(norm))
        self._optimizer.step(
            self._recipe.lr_factor(self._begun + self._planned * self._steps // self.steps_per_round)
        )  # fmt: skip
        for parameter in self.params.values():
            parameter.grad = None

    def contribute(self) -> Tensors:
        """Tensors of their own: the next lease begins with others."""
        changes = {name: parameter.detach() - self._record[name] for name, parameter in self.params.items()}
        return {**changes, **_named(self._optimizer.state_tensors())}

    def apply(self, version: Mapping[str, Tensor]) -> None:
        """Take over a committed version; the parameters follow when a lease begins."""
        place = next(iter(self.params.values())).device
        self._record = {name: tensor.detach().to(place, copy=True) for name, tensor in version.items()}


class WindowsMerge:
    """The merge half: its model's parameters and its optimizer's state are those of record."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._params, self._recipe = trainable(model), recipe
        self._smallest_first = sorted(self._params, key=lambda name: self._params[name].numel())
        self._optimizer = recipe.make_optimizer(self._params)
        self._optimizer.start()
        self._mean: dict[str, Tensor] = {}

    def version(self) -> Mapping[str, Tensor]:
        return {**self._params, **_named(self._optimizer.state_tensors())}

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> Reduced:
        """Means by tokens, added up in the order of the answers."""
        del planned_tokens
        tokens = sum(answer.said.tokens for answer in answers)
        self._mean = {}
        for name, tensor in self.version().items():
            mean = torch.zeros_like(tensor, dtype=torch.float32)
            for answer in answers:
                mean.add_(answer.said.tensors[name].to(mean.device), alpha=answer.said.tokens / tokens)
            self._mean[name] = mean.round_() if mean.ndim == 0 else mean  # counts of steps are alike
        whole = float(nn.utils.get_total_norm(self._mean.values()))
        norm = float(nn.utils.get_total_norm([self._mean[name] for name in self._params]))
        norm = norm if math.isfinite(whole) else whole
        bad = unusable(answers, norm=norm, norms=lambda: self.norms(answers))
        return Reduced(norm=norm, bad=bad)

    def norms(self, answers: Sequence[Answer]) -> list[float]:
        """The length of each one's way."""
        return [
            float(nn.utils.get_total_norm([item.tensors[name].double() for name in self._params]))
            if item.tokens
            else 0.0
            for item in (answer.said for answer in answers)
        ]

    def without_effect(self, answers: Sequence[Answer]) -> tuple[int, ...]:
        return without_effect(answers, names=self._smallest_first)

    def is_plausible(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """No second moment is negative: its root would be no number, at every worker, for the rest of the run."""
        del num_units
        moments = [tensor for name, tensor in tensors.items() if name.startswith(STATE + SECOND_MOMENT)]
        return all(bool((tensor >= 0).all()) for tensor in moments)

    def update(self) -> Mapping[str, Tensor]:
        return self._mean

    def load_update(self, update: Mapping[str, Tensor]) -> None:
        self._mean = dict(update)

    @torch.no_grad()
    def step(self, *, norm: float, tokens: int, version: int) -> float:
        """Take the means over; the learning-rate factor of the window's last step."""
        del norm, version
        for name, parameter in self._params.items():
            parameter.add_(self._mean[name].to(parameter.device))
        self._optimizer.load_state_tensors(_state_in(self._mean))
        return self._recipe.lr_factor(tokens)

    def state_tensors(self) -> Mapping[str, Tensor]:
        return self._optimizer.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._optimizer.load_state_tensors(tensors)


def _named(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {STATE + name: tensor for name, tensor in state.items()}


def _state_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(STATE): tensor for name, tensor in tensors.items() if name.startswith(STATE)}
