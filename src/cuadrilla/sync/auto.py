"""Chooses for each round an exact step, a window of some length, or the fastest machine alone: the highest value of

    value of a length = how much its steps lower the loss (`plan/predict.py`) / seconds of one of its steps

The seconds of a length that was tried lately are measured. For any other they follow from the measured speeds, with
one transfer in each round; a window's transfer has `window_bytes` times the bytes of an exact round's. Each worker of
a window also runs the optimizer. The estimate leaves that out, and a trial shows it.

`ALONE` means that only the fastest machine trains. Its rounds are as long as the longest window, and each step of the
run becomes up to `CREW_STEP` smaller ones, which lower the loss more at equal tokens. No other machine uses the link to
the coordinator then. `ALONE` has to beat the longest window as measured with all lanes. Where `ALONE` promises most,
that window is tried first, whatever it promises. It is measured again as often as `PROBE_COST` allows.
While a crew has one member, it is `ALONE` in the shortest windows that its transfers allow, so that a second machine
gets work soon after it has joined.

Exact rounds and windows have the same state of record, so one can follow the other. A version is sent in the form that
the next round needs, and a worker sees from it what to do. A resumed run begins with exact steps again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cuadrilla.plan.predict import TEACHES, lengths, parts_alone, smaller_steps_teach
from cuadrilla.plan.share import Pace, share_units
from cuadrilla.sync.membership import MIN_MEASUREMENTS, Rules
from cuadrilla.sync.work import ALONE, PROBE_COST, Rounds, Work

BETTER = 1.03
"""The crew changes to another length if its value is more than this many times that of the present one."""
UNTRIED = 1.25
"""Factor on the estimated value of `ALONE` until it is tried: the machine's speed was measured while it coordinated."""
MEMORY_SECONDS = 600.0
"""How long the measurement of a length counts."""
LITTLE = 0.05
"""Largest part of the time of the only member that its transfers may take in the rounds that are chosen for it."""


@dataclass(frozen=True, kw_only=True)
class Took:
    """A measurement: the seconds of a step with these members, and when it was taken."""

    seconds: float
    members: frozenset[str]
    at: float


@dataclass(kw_only=True)
class Tried:
    """`present`: length of the present rounds; `longest`: of the longest window; `steps_of_one`: of the rounds of an
    only member, 0 while there are several; `measured`: results by length.
    """

    present: int = 1
    longest: int = 1
    steps_of_one: int = 0
    measured: dict[int, Took] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AutoRounds(Rounds):
    """Like `Rounds`, but each round has a length of its own."""

    window_bytes: float
    tried: Tried = field(default_factory=Tried)

    @property
    def kind(self) -> int:
        return self.tried.present

    def shares(self, num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
        """As in `Rounds`, but `ALONE` gives everything to the fastest member."""
        return self._shares(self.tried.present, num_groups, paces=paces)

    def length(self, work: Work) -> int:
        """Steps of the next round: the present length, unless another has a higher value. While a member is not
        measured the length stays, so a run begins with exact steps; they begin anew when a second member joins.
        """
        last, tried, members = work.merged_steps, self.tried, work.crew.members
        if len(members) > 1 and tried.steps_of_one:
            tried.present, tried.steps_of_one = 1, 0
        elif last and members and all(member.measurements >= MIN_MEASUREMENTS for member in members.values()):
            tried.longest = lengths(work.rules.num_steps)[-1]
            tried.present = self._of_several(work) if len(members) > 1 else self._of_one(work)
        if last and (self._steps(tried.present) > 1) != (last > 1):
            work.crew.change_transfers(self.window_bytes if last == 1 else 1 / self.window_bytes)
        return self._steps(tried.present)

    def _of_several(self, work: Work) -> int:
        """The length with the highest value."""
        self._note(work)
        tried = self.tried
        values = {length: self._value(length, work) for length in (*lengths(work.rules.num_steps), ALONE)}
        alone = values[ALONE] if self._known(tried.longest, work) else values.pop(ALONE)
        best = max(values, key=values.__getitem__)
        if ALONE not in values and (tried.present == ALONE or alone > BETTER * values[best]):
            return tried.longest
        return best if values[best] > BETTER * values[tried.present] else tried.present

    def _of_one(self, work: Work) -> int:
        """The length for the only member: the shortest that its transfers allow, in smaller steps where these help."""
        tried, groups = self.tried, work.rules.units_per_step
        smaller = _parts_alone(work.rules) > 1 and tried.longest > 1
        for steps in lengths(work.rules.num_steps)[smaller:]:
            (pace,) = self._paces(steps, work).values()
            if pace.fixed_seconds <= LITTLE * pace.seconds(groups):
                break
        tried.steps_of_one = steps
        return ALONE if smaller else steps

    def parts(self, work: Work) -> int:
        """Optimizer steps in each step of the run: several if a machine trains alone."""
        return _parts_alone(work.rules) if self.tried.present == ALONE else 1

    def _steps(self, length: int) -> int:
        return length or self.tried.steps_of_one or self.tried.longest

    def _note(self, work: Work) -> None:
        """Measure the last round; the result is averaged with an earlier one of the same members."""
        tried, members, now = self.tried, frozenset(work.crew.members), work.crew.now
        seconds = (now - work.opened_at) / work.merged_steps
        before = tried.measured.get(tried.present)
        if before is not None and before.members == members:
            seconds = (before.seconds + seconds) / 2
        tried.measured[tried.present] = Took(seconds=seconds, members=members, at=now)

    def _known(self, length: int, work: Work) -> Took | None:
        """The measurement of a length, if it is recent and was taken with the present members. In `ALONE` that of
        another length counts for longer: until trying it again costs at most `PROBE_COST` of the time.
        """
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
            worth = TEACHES[length] if sum(map(bool, shares.values())) > 1 else 1.0
        return worth / max(seconds, 1e-9)

    def _shares(self, length: int, num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
        if length != ALONE:
            return share_units(num_groups, paces=paces)
        fastest = min(paces, key=lambda name: (paces[name].seconds(num_groups), name), default="")
        return {name: num_groups if name == fastest else 0 for name in paces}

    def _paces(self, length: int, work: Work) -> dict[str, Pace]:
        """The pace of each member in rounds of this length, in groups of as many units as the round has steps."""
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
