"""Chooses for each round an exact step, a window of some length, or the fastest machine alone: the highest value of

    value of a kind = how much its steps lower the loss (`plan/predict.py`) / seconds of one of its steps

The seconds of a kind that was tried lately are measured. For any other they follow from the measured speeds, with one
transfer in each round; a window's transfer has `window_bytes` times the bytes of an exact round's. Each worker of a
window also runs the optimizer. The estimate leaves that out, and a trial shows it.

The rounds of the fastest machine alone are as long as the longest window, and each step of the run becomes up to
`CREW_STEP` smaller ones, which lower the loss more at equal tokens. No other machine uses the link to the coordinator
then. Alone it has to beat the longest window as measured with all lanes. Where it promises most, that window is tried
first, whatever it promises. While a crew has one member, its rounds are the shortest that its transfers allow, so that
a second machine gets work soon after it has joined.

Exact rounds and windows have the same state of record, so one can follow the other. A version is sent in the form that
the next round needs, and a worker sees from it what to do. A resumed run begins with exact steps again.
"""

from dataclasses import dataclass, field

from cuadrilla.plan.predict import TEACHES, lengths, parts_alone, smaller_steps_teach
from cuadrilla.plan.share import Pace
from cuadrilla.sync.membership import MIN_MEASUREMENTS
from cuadrilla.sync.work import PROBE_COST, Round, Rounds, Work, shares_alone

MIN_ADVANTAGE = 1.03
"""The crew changes to another kind if its value is more than this many times that of the present one."""
MEMORY_SECONDS = 600.0
"""How long the measurement of a kind counts. That of rounds of several machines counts for longer: until trying them
again costs `PROBE_COST` of the time. A machine alone is estimated anew, so that a crew is never slower for long."""
WINDOW_BYTES = 0.66
"""Bytes of a window / of an exact round: 0.64 to 0.70 for our sizes with Muon, 0.78 with AdamW. For estimates only."""
MAX_TRANSFER_PART = 0.05
"""Largest part of the time of the only member that its transfers may take in the rounds that are chosen for it."""


@dataclass(kw_only=True)
class AutoRounds(Rounds):
    """Like `Rounds`, but each round has a kind of its own. `lone`: the present one was chosen for an only member.
    `measured`: by kind and members, the seconds of a step, and when they were measured.
    """

    window_bytes: float = WINDOW_BYTES
    lone: bool = False
    measured: dict[tuple[Round, frozenset[str]], tuple[float, float]] = field(default_factory=dict)

    def choose(self, work: Work) -> Round:
        """The present kind, unless another has a higher value. Until each member has answered once, or is known
        to need long for a version, it stays. So a run begins with exact steps; they begin anew with a second member.
        """
        kind, members = work.kind, work.crew.members
        if len(members) > 1 and self.lone:
            kind, self.lone = Round(), False
        elif work.step_seconds and members and all(each.measurements or each.fetches_long for each in members.values()):
            self.lone = len(members) == 1
            kind = self._for_one(work) if self.lone else self._for_several(work)
        work.crew.volume = self._volume(kind)
        return kind

    def _for_several(self, work: Work) -> Round:
        """The kind with the highest value. Rounds of members that are not measured yet are no measurement of a kind."""
        if all(each.fetches_long or each.measurements >= MIN_MEASUREMENTS for each in work.crew.members.values()):
            self._note(work)
        kinds = [Round(steps=steps) for steps in lengths(work.rules.num_steps)]
        longest, single = kinds[-1], Round(steps=kinds[-1].steps, alone=True, parts=_parts(work))
        values = {kind: self._value(kind, work) for kind in (*kinds, single)}
        promised = values[single] if self._known(longest, work) else values.pop(single)
        best = max(values, key=values.__getitem__)
        if single not in values and (work.kind.alone or promised > MIN_ADVANTAGE * values[best]):
            return longest
        return best if values[best] > MIN_ADVANTAGE * values[work.kind] else work.kind

    def _for_one(self, work: Work) -> Round:
        """The shortest rounds that the only member's transfers allow, in smaller steps where these help."""
        parts = _parts(work)
        for steps in lengths(work.rules.num_steps)[parts > 1 :]:
            kind = Round(steps=steps, alone=parts > 1, parts=parts)
            (pace,) = self._paces(kind, work).values()
            if pace.fixed_seconds <= MAX_TRANSFER_PART * pace.seconds(work.rules.units_per_step):
                break
        return kind

    def _note(self, work: Work) -> None:
        """Measure the last round; the result is averaged with an earlier one of the same members."""
        key, now = _key(work.kind, work), work.crew.now
        before, _ = self.measured.get(key, (work.step_seconds, now))
        self.measured = {
            (kind, members): took
            for (kind, members), took in self.measured.items()
            if members == key[1] or now - took[1] < MEMORY_SECONDS  # those of other members, for when these come back
        }
        self.measured[key] = (before + work.step_seconds) / 2, now

    def _known(self, kind: Round, work: Work) -> float:
        """The measured seconds of a step, with the present members and not too old; else 0."""
        seconds, at = self.measured.get(_key(kind, work), (0.0, 0.0))
        more = 0.0 if kind.alone else (seconds - work.step_seconds) * kind.steps
        return seconds if work.crew.now - at < max(MEMORY_SECONDS, more / PROBE_COST) else 0.0

    def _value(self, kind: Round, work: Work) -> float:
        units, paces = work.rules.units_per_step, self._paces(kind, work)
        shares = shares_alone(units, paces=paces) if kind.alone else self.shares(units, paces=paces)
        seconds = self._known(kind, work)
        if not seconds:
            longest = max(paces[name].seconds(share) for name, share in shares.items() if share)
            seconds = (longest + work.merge_seconds) / kind.steps
        worth = TEACHES[kind.steps] if sum(map(bool, shares.values())) > 1 else 1.0
        if kind.alone:
            rules = work.rules
            worth = smaller_steps_teach(rules.step_tokens, parts=kind.parts, num_steps=rules.num_steps)
        return worth / max(seconds, 1e-9)

    def _volume(self, kind: Round) -> float:
        return self.window_bytes if kind.steps > 1 else 1.0

    def _paces(self, kind: Round, work: Work) -> dict[str, Pace]:
        """The pace of each member in rounds of this kind, in groups of as many units as the round has steps."""
        at_once = len(work.crew.members) if kind.alone and not work.kind.alone else 1
        return work.crew.paces(group=kind.steps, volume=self._volume(kind) / at_once)


def _key(kind: Round, work: Work) -> tuple[Round, frozenset[str]]:
    return kind, frozenset(work.crew.members)


def _parts(work: Work) -> int:
    """The steps that a machine alone takes in place of each step of the run. They need windows."""
    rules = work.rules
    if len(lengths(rules.num_steps)) == 1:
        return 1
    return parts_alone(rules.units_per_step, step_tokens=rules.step_tokens, num_steps=rules.num_steps)
