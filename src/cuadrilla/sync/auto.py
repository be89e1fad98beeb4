"""Exact steps or windows, of whatever length teaches most in a second by what the rounds so far took.

    value of a length = what its steps teach (`plan/predict.py`) / seconds of one of its steps

A length that was tried lately counts as it was measured, any other as it follows from the measured speeds and
transfers: units by speed, one transfer in each round, and a window's moves `window_bytes` times as much as an exact
round's. What windows cost beside that, a step of the optimizer at each worker, shows when they are tried.

The state of record is whole, in both: the version before a round is told in the form that the round needs, and a worker
sees from the version which half computes it. So a round of either kind can follow any other, and a run that stops and
goes on begins with exact steps again.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn

from cuadrilla.link.base import Lease, Tensors
from cuadrilla.plan.predict import WINDOWS, teaches
from cuadrilla.plan.share import Pace
from cuadrilla.sync.events import Answer
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.membership import MIN_MEASUREMENTS
from cuadrilla.sync.strategy import MergeHalf, Parameters, Recipe, Reduced, Strategy, Sums, WorkerHalf, trainable
from cuadrilla.sync.windows import STATE, Windows
from cuadrilla.sync.work import Rounds, Share, WholeRounds, Work

LENGTHS = (1, *WINDOWS)
"""Steps of a round; 1 is an exact one."""
BETTER = 1.03
"""A length must promise so much more than the present one."""
MEMORY_SECONDS = 600.0
"""So long a measurement counts."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The strategy of `sync.kind = "auto"`; see the module. `window_bytes`: in times of those of an exact round."""

    window_bytes: float = 1.0
    moves_weights: bool = True

    @classmethod
    def of(cls, model: nn.Module, recipe: Recipe) -> "Auto":
        """For this model."""
        exact, windows = (
            _num_bytes(each.versions_like(model, recipe)) + _num_bytes(each.contributions_like(model, recipe))
            for each in (strategy_of(1), strategy_of(2))
        )
        return cls(window_bytes=windows / exact)

    def worker(self, model: nn.Module, recipe: Recipe) -> "AutoWorker":
        return AutoWorker(model, recipe)

    def merge(self, model: nn.Module, recipe: Recipe) -> "AutoMerge":
        return AutoMerge(model, recipe)

    def rounds(self, *, share: Share) -> Rounds:
        return AutoRounds(share=share, window_bytes=self.window_bytes)

    def versions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        return [form for steps in (1, 2) for form in strategy_of(steps).versions_like(model, recipe)]

    def contributions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        return [form for steps in (1, 2) for form in strategy_of(steps).contributions_like(model, recipe)]


def strategy_of(steps: int) -> Strategy:
    """That of a round of so many steps."""
    return Windows(steps=steps) if steps > 1 else Exact()


def _num_bytes(forms: Sequence[Tensors]) -> int:
    return sum(tensor.numel() * tensor.element_size() for form in forms for tensor in form.values())


class AutoWorker:
    """The worker half: that of the strategy whose version came last."""

    one_unit_per_micro_step = False

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.params: Parameters = trainable(model)
        self._model, self._recipe = model, recipe
        self._half: WorkerHalf = strategy_of(1).worker(model, recipe)
        self._in_windows = False

    def apply(self, version: Mapping[str, Tensor]) -> None:
        in_windows = any(name.startswith(STATE) for name in version)
        if in_windows != self._in_windows:
            self._half, self._in_windows = strategy_of(1 + in_windows).worker(self._model, self._recipe), in_windows
        self._half.apply(version)

    def begin(self, lease: Lease) -> None:
        self._half.begin(lease)

    def collecting_statistics(self) -> AbstractContextManager[None]:
        return self._half.collecting_statistics()

    def after_micro_step(self, sums: Sums) -> None:
        self._half.after_micro_step(sums)

    def local_step(self, sums: Sums) -> None:
        self._half.local_step(sums)

    def contribute(self) -> Tensors:
        return self._half.contribute()


class AutoMerge:
    """The merge half: that of the strategy of the open round. The optimizer's state goes from one to the other."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._half: MergeHalf = strategy_of(1).merge(model, recipe)
        self._names = self._contributed(1)
        self._in_windows = False

    def _turn(self, steps: int) -> MergeHalf:
        if (steps > 1) != self._in_windows:
            state, self._in_windows = self._half.state_tensors(), steps > 1
            for parameter in trainable(self._model).values():
                parameter.grad = None  # the other half would take a step with it
            self._half, self._names = strategy_of(steps).merge(self._model, self._recipe), self._contributed(steps)
            if state:
                self._half.load_state_tensors(state)
        return self._half

    def _contributed(self, steps: int) -> frozenset[str]:
        return frozenset(*strategy_of(steps).contributions_like(self._model, self._recipe))

    def version(self, *, steps: int) -> Mapping[str, Tensor]:
        return self._turn(steps).version(steps=steps)

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> Reduced:
        return self._half.reduce(answers, planned_tokens=planned_tokens)

    def norms(self, answers: Sequence[Answer]) -> list[float]:
        return self._half.norms(answers)

    def without_effect(self, answers: Sequence[Answer]) -> tuple[int, ...]:
        return self._half.without_effect(answers)

    def is_plausible(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Of the right one of both forms, too."""
        return tensors.keys() == self._names and self._half.is_plausible(tensors, num_units=num_units)

    def update(self) -> Mapping[str, Tensor]:
        return self._half.update()

    def load_update(self, update: Mapping[str, Tensor], *, steps: int) -> None:
        self._turn(steps).load_update(update, steps=steps)

    def step(self, *, norm: float, version: int, steps: int) -> float:
        return self._half.step(norm=norm, version=version, steps=steps)

    def state_tensors(self) -> Mapping[str, Tensor]:
        return self._half.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._half.load_state_tensors(tensors)


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds of a step, with these members, and when it was."""

    seconds: float
    members: frozenset[str]
    at: float


@dataclass(frozen=True, kw_only=True)
class AutoRounds(WholeRounds):
    """As `WholeRounds`, with a length of their own each."""

    window_bytes: float
    measured: dict[int, Took] = field(default_factory=dict)

    def length(self, work: Work) -> int:
        """Of the next round: that of the last one, unless another promises more; exact until all are measured."""
        last = work.merged_steps
        if not last or any(member.measurements < MIN_MEASUREMENTS for member in work.crew.members.values()):
            return last or 1
        self._note(work)
        present = max(length for length in LENGTHS if length <= last)
        values = {length: self._value(length, work) for length in LENGTHS}
        best = max(values, key=values.__getitem__)
        chosen = best if values[best] > BETTER * values[present] else present
        if (chosen > 1) != (last > 1):
            work.crew.change_transfers(self.window_bytes if chosen > 1 else 1 / self.window_bytes)
        return chosen

    def _note(self, work: Work) -> None:
        """How long the last round took."""
        steps, members, now = work.merged_steps, frozenset(work.crew.members), work.crew.now
        seconds = (now - work.opened_at) / steps
        before = self.measured.get(steps)
        if before is not None and before.members == members:
            seconds = (before.seconds + seconds) / 2
        self.measured[steps] = Took(seconds=seconds, members=members, at=now)

    def _value(self, length: int, work: Work) -> float:
        known, paces = self.measured.get(length), self._paces(length, work)
        shares = self.share(work.rules.units_per_step, paces=paces)
        if known and known.members == work.crew.members.keys() and work.crew.now - known.at < MEMORY_SECONDS:
            seconds = known.seconds
        else:
            longest = max(paces[name].seconds(share) for name, share in shares.items() if share)
            seconds = (longest + work.merge_seconds) / length
        return (teaches(length) if sum(map(bool, shares.values())) > 1 else 1.0) / max(seconds, 1e-9)

    def _paces(self, length: int, work: Work) -> dict[str, Pace]:
        """Of groups of so many units, as they would be in rounds of this length."""
        bytes_now, bytes_then = (self.window_bytes if steps > 1 else 1.0 for steps in (work.merged_steps, length))
        return {
            name: Pace(
                units_per_second=pace.units_per_second / length,
                fixed_seconds=pace.fixed_seconds * bytes_then / bytes_now,
            )
            for name, pace in work.crew.paces().items()
        }
