"""The work of a run, and the rule by which it is leased.

`Work` keeps which units are free, leased, answered, failed or skipped. `Rounds` decides what is leased to whom, and
when a version is due. A round is a fixed set of units, shared so that all members finish at the same time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cuadrilla.link.base import Lease, Version
from cuadrilla.plan.share import Pace, share_units
from cuadrilla.sync.events import Action, Answer, Late, Merge, Send
from cuadrilla.sync.ledger import Grant, Ledger
from cuadrilla.sync.membership import MIN_MEASUREMENTS, Membership, Rules

ALONE = 0
"""In the place of a round's number of steps: the fastest machine trains alone. 1 is an exact step, more is a window."""
MAX_FAILURES_OF_A_UNIT = 2
PROBE_COST = 0.02
"""Measuring members that have no share takes at most this part of the time, for all of them together."""
LATE_FACTOR, MIN_LATE_SECONDS = 1.5, 0.5
"""A lease is late after this many times its expected time, and at least this time: idle members get its units, too."""


@dataclass(kw_only=True)
class Work:
    """`answers` wait for their merge; `failures`: the workers that failed each unit; `skipped`: units that no member
    could compute. `merged_steps`: optimizer steps of the last version; `parts`: into how many each step of the run is
    split in a lease of the whole round. `merge_seconds`: running mean from the last answer of a round to its version.
    """

    rules: Rules
    crew: Membership
    version: int = 0
    tokens: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    merged_steps: int = 0
    parts: int = 1
    opened_at: float = 0.0
    merge_seconds: float = 0.0
    merging: Merge | None = None
    merging_since: float = 0.0

    # -- rounds --------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps of the open round: the version number grows by one for each."""
        return self.ledger.opened // self.rules.units_per_step - self.version

    def open_round(self, steps: int, *, parts: int = 1) -> None:
        """Open the next units of the run, for `steps` optimizer steps or for the rest of the run."""
        self.parts = parts
        self.ledger.open_units(min(steps, self.rules.num_steps - self.version) * self.rules.units_per_step)
        self.opened_at = self.crew.now

    # -- leases --------------------------------------------------------------------------------------------------------

    def idle(self) -> list[str]:
        """Members that hold no lease, the fastest first."""
        busy, speeds = {lease.worker for lease in self.ledger.leases.values()}, self.crew.speeds()
        return sorted(speeds.keys() - busy, key=lambda worker: (-speeds[worker], worker))

    def failed_by(self, worker: str) -> set[int]:
        """Units that another member should compute: those that this worker's node failed, or those that this worker
        failed if there is no other node. Empty for the only member.
        """
        own = self.crew.of_node(worker)
        if own == self.crew.members.keys():
            own = {worker} if len(own) > 1 else set()
        return {unit for unit, failed in self.failures.items() if not own.isdisjoint(failed)}

    def grant(self, worker: str, units: Sequence[int]) -> list[Action]:
        """Lease these units, which another worker may also hold; no action if there is none."""
        if not units:
            return []
        grant = self.ledger.grant(worker, units, version=self.version, at=self.crew.now)
        whole = len(grant.units) == self.steps * self.rules.units_per_step
        parts = self.parts if whole else 1
        lease = Lease(
            lease_id=grant.lease_id,
            version=grant.version,
            units=grant.units,
            planned_tokens=self.steps * self.rules.step_tokens,
            steps=self.steps * parts,
            parts=parts,
            whole=whole,
        )
        return [Send(worker=worker, message=lease)]

    def tell_version(self, worker: str) -> Action:
        return Send(worker=worker, message=Version(version=self.version, next_round_steps=self.steps))

    def late(self) -> list[Grant]:
        """Leases that take too long: their units may be leased a second time."""
        now, expected = self.crew.now, self.crew.expected_seconds
        leases = self.ledger.leases.values()
        return [lease for lease in leases if now - lease.at > max(MIN_LATE_SECONDS, LATE_FACTOR * expected(lease))]

    # -- answers -------------------------------------------------------------------------------------------------------

    def revoke(self, units: Iterable[int]) -> None:
        """End all other leases of these units: they are counted, and another answer is not wanted."""
        self.crew.note_revoked(self.ledger.end(units=units))

    def fail(self, grant: Grant, *, is_smallest: bool) -> None:
        """A contribution is unusable: its units are free again. They are skipped if they failed as often as
        `MAX_FAILURES_OF_A_UNIT`, and this lease was of the smallest size.
        """
        self.ledger.uncounted.update(grant.units)
        for unit in grant.units:
            self.failures.setdefault(unit, []).append(grant.worker)
        if is_smallest and len(self.failures[grant.units[0]]) >= MAX_FAILURES_OF_A_UNIT:
            self.skip(grant.units)

    def skip(self, units: Sequence[int]) -> None:
        """Count these units as empty."""
        self.ledger.uncounted.difference_update(units)
        self.ledger.end(units=units)
        self.skipped.update(units)

    def merge(self) -> Merge:
        """The merge of all answers, in the order of their units."""
        ordered = sorted(self.answers.values(), key=lambda answer: answer.grant.units[0])
        units = tuple(sorted({unit for answer in ordered for unit in answer.grant.units} | self.skipped))
        return Merge(
            version=self.version + self.steps,
            steps=self.steps,
            answers=tuple(ordered),
            units=units,
            skipped=tuple(sorted(self.skipped)),
            tokens_before=self.tokens,
        )

    def failed_alone(self, merge: Merge) -> set[str]:
        """Workers that failed units of this version that other workers could compute."""
        excused = {worker for unit in merge.skipped for worker in self.failures.get(unit, ())}
        return {worker for unit in merge.units for worker in self.failures.get(unit, ())} - excused

    def committed(self, merge: Merge) -> None:
        self.version, self.merged_steps = merge.version, merge.steps
        self.merge_seconds = (self.merge_seconds + self.crew.now - self.merging_since) / (
            2 if self.merge_seconds else 1
        )
        self.tokens += sum(answer.contribution.tokens for answer in merge.answers)
        for answer in merge.answers:
            del self.answers[answer.grant.lease_id]
        self.skipped.difference_update(merge.skipped)
        for unit in merge.units:
            self.failures.pop(unit, None)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The default rule: a version is due when all units of its round are counted. Units are dealt in groups of as many
    units as the round has optimizer steps, `steps`. Some strategies have a subclass with another rule.
    """

    steps: int = 1

    def deal(self, work: Work) -> list[Action]:
        """Lease each idle member its share of the free units; units that failed before, one group at a time."""
        idle, free = work.idle(), work.ledger.free
        if not idle or not free:
            return self._back_up_late(work, idle)
        fresh_round = not (work.ledger.leases or work.answers or work.failures)
        actions: list[Action] = []
        size = work.steps
        shares = self.shares(math.ceil(len(free) / size), paces=_paces_of_groups(work))
        shares = _probing(work, shares) if fresh_round else shares
        for worker in idle:
            count = shares[worker] if fresh_round else max(1, shares[worker])  # every idle member gets returned units
            count = 1 if work.failures.keys() & work.ledger.free else count
            able = work.ledger.free - work.failed_by(worker)
            actions.extend(work.grant(worker, sorted(able)[: size * count]))
        if work.ledger.free and not work.ledger.leases:  # every idle member failed these units: try once more
            actions.extend(work.grant(idle[0], sorted(work.ledger.free)[:size]))
        return actions

    def _back_up_late(self, work: Work, idle: Sequence[str]) -> list[Action]:
        """Lease the units of late leases to idle members, too. The first answer counts."""
        late = work.late() if idle else []
        units = sorted(work.ledger.held_by_one() & {unit for lease in late for unit in lease.units})
        if not units:
            return []
        size, paces, granted = work.steps, _paces_of_groups(work), list[Action]()
        shares = share_units(math.ceil(len(units) / size), paces={worker: paces[worker] for worker in idle})
        for worker in idle:
            chosen = [unit for unit in units if unit not in work.failed_by(worker)][: size * shares[worker]]
            units = [unit for unit in units if unit not in chosen]
            granted.extend(work.grant(worker, chosen))
        return [*(Late(worker=lease.worker, lease_id=lease.lease_id) for lease in late), *granted] if granted else []

    def due(self, work: Work) -> Merge | None:
        """The merge that makes the next version, once every unit of the round is counted."""
        return None if work.ledger.uncounted else work.merge()

    def is_smallest(self, grant: Grant, work: Work) -> bool:
        """Whether these units cannot be leased in smaller parts."""
        return len(grant.units) <= work.steps

    def shares(self, num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
        return share_units(num_groups, paces=paces)

    @property
    def kind(self) -> int:
        """Steps of the present rounds, or `ALONE`."""
        return self.steps

    def length(self, work: Work) -> int:
        """Steps of the next round."""
        del work
        return self.steps

    def parts(self, work: Work) -> int:
        """Optimizer steps for each step of the run, in a lease of the whole next round."""
        del work
        return 1

    def next(self, work: Work) -> list[Action]:
        """Open the next round, and send the committed version to every member."""
        work.open_round(self.length(work), parts=self.parts(work))
        return [work.tell_version(worker) for worker in work.crew.members]


def _paces_of_groups(work: Work) -> dict[str, Pace]:
    size = work.steps
    return {
        worker: Pace(units_per_second=pace.units_per_second / size, fixed_seconds=pace.fixed_seconds)
        for worker, pace in work.crew.paces().items()
    }


def _probing(work: Work, planned: Mapping[str, int]) -> dict[str, int]:
    """Shares of a new round that also measure members without a share now and then: a slow one may be faster now.

    Such a member gets one group of the fastest member's share if it has fewer than `MIN_MEASUREMENTS`, or if it has
    waited for so many rounds that one group costs at most its part of `PROBE_COST`.
    """
    shares = dict(planned)
    paces, fastest = _paces_of_groups(work), max(shares, key=lambda name: (shares[name], name), default="")
    round_seconds = max((paces[name].seconds(count) for name, count in shares.items() if count), default=math.inf)
    cost = PROBE_COST / max(1, sum(share == 0 for share in shares.values()))
    for worker, member in work.crew.members.items():
        member.rounds_without = 0 if shares[worker] else member.rounds_without + 1
        rounds_for_a_group = paces[worker].seconds(1) / round_seconds
        due = member.measurements < MIN_MEASUREMENTS or member.rounds_without * cost >= rounds_for_a_group
        if member.rounds_without and due and shares[fastest] > 1:
            shares[fastest] -= 1
            shares[worker] = 1
            member.rounds_without = 0
    return shares
