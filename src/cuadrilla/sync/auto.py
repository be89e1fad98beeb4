"""Exact steps, windows or the fastest machine alone: what teaches most in a second by what the rounds so far took.

    value of a length = what its steps teach (`plan/predict.py`) / seconds of one of its steps

A length that was tried lately counts as it was measured, any other as it follows from the measured speeds and
transfers: units by speed, one transfer in each round, and a window's moves `window_bytes` times as much as an exact
round's. What windows cost beside that, a step of the optimizer at each worker, shows when they are tried. Alone is the
longest window with a single lane, in up to `CREW_STEP` smaller steps for each of the run's, which teach more; nobody
shares its line to the coordinator. It has to be better than that window, measured with all lanes, which is measured
again as often as `PROBE_COST` allows, and is tried whatever it promises where alone promises most.

The state of record is whole, in both: the version before a round is told in the form that the round needs, and a worker
sees from the version which half computes it. So a round of either kind can follow any other, and a run that stops and
goes on begins with exact steps again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from cuadrilla.link.base import Tensors
from cuadrilla.plan.predict import lengths, parts_alone, smaller_steps_teach, teaches
from cuadrilla.plan.share import Pace, share_units
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.membership import MIN_MEASUREMENTS, Rules
from cuadrilla.sync.strategy import MergeHalf, Parameters, Recipe, Strategy, trainable
from cuadrilla.sync.windows import STATE, Windows
from cuadrilla.sync.work import ALONE, PROBE_COST, Rounds, Work

BETTER = 1.03
"""A length must promise so much more than the present one."""
UNTRIED = 1.25
"""The machine alone is tried once if it promises so much less: its measured speed is that of one which coordinates."""
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
        exact, windows = (round_bytes(strategy_of(steps), model, recipe) for steps in (1, 2))
        return cls(window_bytes=windows / exact)

    def worker(self, model: nn.Module, recipe: Recipe) -> "AutoWorker":
        return AutoWorker(model, recipe)

    def merge(self, model: nn.Module, recipe: Recipe) -> "AutoMerge":
        return AutoMerge(model, recipe)

    def rounds(self) -> Rounds:
        return AutoRounds(window_bytes=self.window_bytes)

    def versions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        return [form for steps in (1, 2) for form in strategy_of(steps).versions_like(model, recipe)]

    def contributions_like(self, model: nn.Module, recipe: Recipe) -> Sequence[Tensors]:
        return [form for steps in (1, 2) for form in strategy_of(steps).contributions_like(model, recipe)]


def strategy_of(steps: int) -> Strategy:
    """That of a round of so many steps."""
    return Windows(steps=steps) if steps > 1 else Exact()


def round_bytes(strategy: Strategy, model: nn.Module, recipe: Recipe) -> int:
    """Bytes of a version and a contribution."""
    forms = strategy.versions_like(model, recipe)[0], strategy.contributions_like(model, recipe)[0]
    return sum(tensor.nbytes for form in forms for tensor in form.values())


class AutoWorker:
    """The worker half: that of the strategy whose version came last."""

    one_unit_per_micro_step = False

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.params: Parameters = trainable(model)
        self._model, self._recipe = model, recipe
        self._take(in_windows=False)

    def _take(self, *, in_windows: bool) -> None:
        """Be this half, but for `apply`."""
        self._in_windows, self._half = in_windows, strategy_of(1 + in_windows).worker(self._model, self._recipe)
        self.begin, self.contribute = self._half.begin, self._half.contribute
        self.after_micro_step, self.local_step = self._half.after_micro_step, self._half.local_step
        self.collecting_statistics = self._half.collecting_statistics

    def apply(self, version: Mapping[str, Tensor]) -> None:
        in_windows = any(name.startswith(STATE) for name in version)
        if in_windows != self._in_windows:
            self._take(in_windows=in_windows)
        self._half.apply(version)


class AutoMerge:
    """The merge half: that of the strategy of the open round. The optimizer's state goes from one to the other."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._take(1)

    def _take(self, steps: int) -> None:
        """Be this half, but for what names the steps, or is of either."""
        strategy, self._in_windows = strategy_of(steps), steps > 1
        self._names = [frozenset(form) for form in strategy.contributions_like(self._model, self._recipe)]
        self._half = half = strategy.merge(self._model, self._recipe)
        self.reduce, self.norms, self.update, self.step = half.reduce, half.norms, half.update, half.step
        self.state_tensors, self.load_state_tensors = half.state_tensors, half.load_state_tensors

    def _turn(self, steps: int) -> MergeHalf:
        if (steps > 1) != self._in_windows:
            state = self.state_tensors()
            for parameter in trainable(self._model).values():
                parameter.grad = None  # the other half would take a step with it
            self._take(steps)
            if state:
                self.load_state_tensors(state)
        return self._half

    def version(self, *, steps: int) -> Mapping[str, Tensor]:
        return self._turn(steps).version(steps=steps)

    def is_plausible(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Also whether it has the right one of both forms."""
        return tensors.keys() in self._names and self._half.is_plausible(tensors, num_units=num_units)

    def load_update(self, update: Mapping[str, Tensor], *, steps: int) -> None:
        self._turn(steps).load_update(update, steps=steps)


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds of a step, with these members, and when it was."""

    seconds: float
    members: frozenset[str]
    at: float


@dataclass(kw_only=True)
class Tried:
    """What the present rounds are, how long the longest are, and how long others took."""

    present: int = 1
    longest: int = 1
    measured: dict[int, Took] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AutoRounds(Rounds):
    """As `Rounds`, with a length of their own each."""

    window_bytes: float
    tried: Tried = field(default_factory=Tried)

    @property
    def kind(self) -> int:
        return self.tried.present

    def shares(self, num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
        """All for the fastest, where it is to be alone."""
        return self._shares(self.tried.present, num_groups, paces=paces)

    def length(self, work: Work) -> int:
        """Steps of the next round: as in the last one, unless others promise more; exact until all are measured."""
        last, tried = work.merged_steps, self.tried
        if last and all(member.measurements >= MIN_MEASUREMENTS for member in work.crew.members.values()):
            possible = lengths(work.rules.num_steps)
            tried.longest = possible[-1]
            self._note(work)
            values = {length: self._value(length, work) for length in (*possible, ALONE)}
            alone = values[ALONE] if self._known(tried.longest, work) else values.pop(ALONE)
            best = max(values, key=values.__getitem__)
            if ALONE not in values and (tried.present == ALONE or alone > BETTER * values[best]):
                tried.present = tried.longest
            elif values[best] > BETTER * values[tried.present]:
                tried.present = best
            if (self._steps(tried.present) > 1) != (last > 1):
                work.crew.change_transfers(self.window_bytes if last == 1 else 1 / self.window_bytes)
        return self._steps(tried.present)

    def parts(self, work: Work) -> int:
        """A machine alone takes smaller steps than a crew."""
        return _parts_alone(work.rules) if self.tried.present == ALONE else 1

    def _steps(self, length: int) -> int:
        return length or self.tried.longest

    def _note(self, work: Work) -> None:
        """How long the last round took."""
        tried, members, now = self.tried, frozenset(work.crew.members), work.crew.now
        seconds = (now - work.opened_at) / work.merged_steps
        before = tried.measured.get(tried.present)
        if before is not None and before.members == members:
            seconds = (before.seconds + seconds) / 2
        tried.measured[tried.present] = Took(seconds=seconds, members=members, at=now)

    def _known(self, length: int, work: Work) -> Took | None:
        """How long it took, if it was tried lately and with these members."""
        took, memory = self.tried.measured.get(length), MEMORY_SECONDS
        if took is None or took.members != work.crew.members.keys():
            return None
        if self.tried.present == ALONE != length:
            more = took.seconds - (work.crew.now - work.opened_at) / work.merged_steps
            memory = max(memory, more * self._steps(length) / PROBE_COST)
        return took if work.crew.now - took.at < memory else None

    def _value(self, length: int, work: Work) -> float:
        known, paces = self._known(length, work), self._paces(length, work)
        shares = self._shares(length, work.rules.units_per_step, paces=paces)
        if known:
            seconds = known.seconds
        else:
            longest = max(paces[name].seconds(share) for name, share in shares.items() if share)
            seconds = (longest + work.merge_seconds) / self._steps(length)
        if length == ALONE:
            rules, parts = work.rules, _parts_alone(work.rules)
            worth = smaller_steps_teach(rules.step_tokens, parts=parts, num_steps=rules.num_steps)
            took, compared = self.tried.measured.get(ALONE), self._known(self.tried.longest, work)
            worth *= UNTRIED if compared and (took is None or took.members != work.crew.members.keys()) else 1.0
        else:
            worth = teaches(length) if sum(map(bool, shares.values())) > 1 else 1.0
        return worth / max(seconds, 1e-9)

    def _shares(self, length: int, num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
        if length != ALONE:
            return share_units(num_groups, paces=paces)
        fastest = min(paces, key=lambda name: (paces[name].seconds(num_groups), name), default="")
        return {name: num_groups if name == fastest else 0 for name in paces}

    def _paces(self, length: int, work: Work) -> dict[str, Pace]:
        """What a round costs each member, in groups of units, as it would be in rounds of this length."""
        rounds = work.merged_steps, self._steps(length)
        bytes_now, bytes_then = (self.window_bytes if steps > 1 else 1.0 for steps in rounds)
        at_once = len(work.crew.members) if length == ALONE != self.tried.present else 1
        return {
            name: Pace(
                units_per_second=pace.units_per_second / self._steps(length),
                fixed_seconds=pace.fixed_seconds * bytes_then / bytes_now / at_once,
            )
            for name, pace in work.crew.paces().items()
        }


def _parts_alone(rules: Rules) -> int:
    return parts_alone(rules.units_per_step, step_tokens=rules.step_tokens, num_steps=rules.num_steps)
