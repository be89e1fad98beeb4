"""The work of a run: the ledger of its units (`Work`), and the rule by which they are leased (`Rounds`).

    free ──grant──▶ leased(worker) ──take──▶ counted, with its answer
      ▲                  │
      └────────end───────┘

A run is an endless sequence of units 0, 1, 2, ... A round is a fixed set of them, shared so that all members finish at
the same time. Invariants (I1 of the fault tests): a unit is counted exactly once, or skipped. An answer is refused if
its lease has ended: its worker was lost, or one of its units was counted meanwhile.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cuadrilla.link.base import Lease, Version
from cuadrilla.plan.share import Pace, share_units
from cuadrilla.sync.events import Action, Answer, Grant, Late, Merge, Send
from cuadrilla.sync.membership import MIN_MEASUREMENTS, Membership, Rules

MAX_FAILURES_OF_A_UNIT = 2
PROBE_COST = 0.02
"""Measuring members that have no share takes at most this part of the time, for all of them together."""
LATE_FACTOR, MIN_LATE_SECONDS = 1.5, 0.5
"""A lease is late after this many times its expected time, and at least this time: idle members get its units, too."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The kind of a round. `steps` of the run: 1 is an exact step, more is a window. `alone`: only the fastest machine
    trains. `parts`: the optimizer steps that it then takes in place of each step of the run.
    """

    steps: int = 1
    alone: bool = False
    parts: int = 1


@dataclass(kw_only=True)
class Work:
    """`leases`: by worker, each of which holds at most one. `answers`: by lease, they wait for their merge. `failures`:
    the workers that failed each unit. `skipped`: units that no member could compute. `kind`, `steps`, `groups`: of the
    open round; a group is never split, and the largest is the first. `step_seconds`: of the last round, for each step,
    at first 0. `merge_seconds`: running mean from the last answer of a round to its version. `next_lease_id` starts at
    a random number (`train/setup.py`), so that a restarted process repeats no number.
    """

    rules: Rules
    crew: Membership
    version: int = 0
    tokens: int = 0
    next_lease_id: int = 1
    leases: dict[str, Grant] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    kind: Round = Round()
    steps: int = 0
    groups: Sequence[range] = ()
    step_seconds: float = 0.0
    opened_at: float = 0.0
    merge_seconds: float = 0.0
    merging: Merge | None = None

    # -- rounds --------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> range:
        """The units of the open round; none between two rounds."""
        size = self.rules.units_per_step
        return range(self.version * size, (self.version + self.steps) * size)

    @property
    def uncounted(self) -> set[int]:
        """Units of the open round that no answer holds and that are not skipped."""
        return set(self.units).difference(self.skipped, *(answer.grant.units for answer in self.answers.values()))

    @property
    def free(self) -> list[range]:
        """Groups that are uncounted and not leased."""
        units = self.uncounted.difference(*(lease.units for lease in self.leases.values()))
        return [group for group in self.groups if group[0] in units]

    # -- leases --------------------------------------------------------------------------------------------------------

    def idle(self) -> list[str]:
        """Members that hold no lease, the fastest first."""
        speeds = self.crew.speeds()
        return sorted(speeds.keys() - self.leases.keys(), key=lambda worker: (-speeds[worker], worker))

    def failed_by(self, worker: str) -> set[int]:
        """Units that another member should compute: those that this worker's node failed, or those that this worker
        failed if there is no other node. Empty for the only member.
        """
        own = self.crew.of_node(worker)
        if own == self.crew.members.keys():
            own = {worker} if len(own) > 1 else set()
        return {unit for unit, failed in self.failures.items() if not own.isdisjoint(failed)}

    def grant(self, worker: str, units: Sequence[int]) -> list[Action]:
        """Lease these units, which another worker may also hold, to an idle one; no action if there is none."""
        assert worker not in self.leases
        if not units:
            return []
        grant = Grant(lease_id=self.next_lease_id, worker=worker, units=tuple(sorted(units)), at=self.crew.now)
        self.leases[worker], self.next_lease_id = grant, self.next_lease_id + 1
        self.crew.members[worker].began_at = math.inf
        whole = len(grant.units) == len(self.units)
        parts = self.kind.parts if whole else 1
        lease = Lease(
            lease_id=grant.lease_id,
            version=self.version,
            units=grant.units,
            planned_tokens=self.steps * self.rules.step_tokens,
            steps=self.steps * parts,
            parts=parts,
            whole=whole,
        )
        return [Send(worker=worker, message=lease)]

    def tell_version(self, worker: str) -> Action:
        return Send(worker=worker, message=Version(version=self.version, next_round_steps=self.steps))

    def take(self, lease_id: int, *, worker: str) -> Grant | None:
        """End the lease that is answered, and return it. None if it has ended, or is another worker's."""
        lease = self.leases.get(worker)
        if lease is None or lease.lease_id != lease_id:
            return None
        return self.leases.pop(worker)

    def end(self, units: Iterable[int]) -> list[Grant]:
        """End all leases that hold one of these units. Their other units become free."""
        gone = set(units)
        ended = [lease for lease in self.leases.values() if gone.intersection(lease.units)]
        for lease in ended:
            del self.leases[lease.worker]
        return ended

    def held_by_one(self) -> set[int]:
        """Units that exactly one worker holds."""
        holders = Counter(unit for lease in self.leases.values() for unit in lease.units)
        return {unit for unit, number in holders.items() if number == 1}

    def late(self) -> list[Grant]:
        """Leases that take too long: their units may be leased a second time."""
        now, expected = self.crew.now, self.crew.expected_seconds
        leases = self.leases.values()
        return [lease for lease in leases if now - lease.at > max(MIN_LATE_SECONDS, LATE_FACTOR * expected(lease))]

    # -- answers -------------------------------------------------------------------------------------------------------

    def fail(self, grant: Grant) -> None:
        """Note that the answer to a lease is unusable. Its units are skipped if they failed as often as
        `MAX_FAILURES_OF_A_UNIT`, and it was no larger than a group.
        """
        for unit in grant.units:
            self.failures.setdefault(unit, []).append(grant.worker)
        is_smallest = len(grant.units) <= len(self.groups[0])
        if is_smallest and len(self.failures[grant.units[0]]) >= MAX_FAILURES_OF_A_UNIT:
            self.end(grant.units)
            self.skipped.update(grant.units)

    def merge(self) -> Merge:
        """The merge of all answers, in the order of their units."""
        ordered = sorted(self.answers.values(), key=lambda answer: answer.grant.units[0])
        return Merge(
            version=self.version + self.steps,
            steps=self.steps,
            answers=tuple(ordered),
            units=tuple(self.units),
            skipped=tuple(sorted(self.skipped)),
            at=self.crew.now,
        )

    def failed_alone(self) -> set[str]:
        """Workers that failed units of this round that other workers could compute."""
        excused = {worker for unit in self.skipped for worker in self.failures.get(unit, ())}
        return {worker for failed in self.failures.values() for worker in failed} - excused

    def committed(self, merge: Merge) -> None:
        self.version, self.steps = merge.version, 0
        self.step_seconds = (self.crew.now - self.opened_at) / merge.steps
        self.merge_seconds = (self.merge_seconds + self.crew.now - merge.at) / (2 if self.merge_seconds else 1)
        self.tokens += merge.tokens
        self.answers.clear()
        self.skipped.clear()
        self.failures.clear()


@dataclass(kw_only=True)
class Rounds:
    """The default rule: a version is due when all units of its round are counted. Units are dealt in groups of one for
    each of the round's steps. A strategy may have a subclass, in which each round has a length of its own.

    `lanes`, in strict windows: relative sizes of the groups. A member gets one lane at a time, so the leases are the
    same for any crew. The merge adds lanes in their order, so one machine that computes them all gives the same bits.
    """

    steps: int = 1
    lanes: Sequence[float] = ()

    def choose(self, work: Work) -> Round:
        """The kind of the next round."""
        del work
        return Round(steps=self.steps)

    def cut(self, work: Work) -> list[range]:
        """The groups of the open round. Lanes are rounded to whole units of a step, and empty ones left out."""
        units = work.rules.units_per_step
        *sums, total = itertools.accumulate(self.lanes or [1] * units, initial=0)
        ends = [*(round(units * end / total) * work.steps for end in sums), len(work.units)]
        groups = [work.units[begin:end] for begin, end in itertools.pairwise(ends)]
        return sorted(filter(None, groups), key=len, reverse=True)

    def shares(self, num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
        """Groups for each of these members."""
        return dict.fromkeys(paces, 1) if self.lanes else share_units(num_groups, paces=paces)

    def deal(self, work: Work) -> list[Action]:
        """Lease each idle member its share of the free groups; groups that failed before, one at a time."""
        if not (idle := work.idle()):
            return []
        if not (groups := work.free):
            return self._back_up_late(work, idle)
        fresh_round = not (work.leases or work.answers or work.failures)
        paces, actions = work.crew.paces(group=work.steps), list[Action]()
        shares = shares_alone(len(groups), paces=paces) if work.kind.alone else self.shares(len(groups), paces=paces)
        shares = _probing(work, shares) if fresh_round else shares
        for worker in idle:
            count = shares[worker] if fresh_round else max(1, shares[worker])  # every idle member gets returned units
            count = 1 if any(group[0] in work.failures for group in groups) else count
            actions += _lease(work, worker, groups, count=count)
        if groups and not work.leases:  # every idle member failed these units: try once more
            actions += work.grant(idle[0], groups[0])
        return actions

    def _back_up_late(self, work: Work, idle: Sequence[str]) -> list[Action]:
        """Lease the groups of late leases to idle members, too. The first answer counts."""
        late = work.late()
        units = work.held_by_one() & {unit for lease in late for unit in lease.units}
        groups = [group for group in work.groups if group[0] in units]
        paces, granted = work.crew.paces(group=work.steps), list[Action]()
        shares = self.shares(len(groups), paces={worker: paces[worker] for worker in idle})
        for worker in idle:
            granted += _lease(work, worker, groups, count=shares[worker])
        backed_up = units.difference(*groups)  # the other groups are left in the list
        late = [lease for lease in late if not backed_up.isdisjoint(lease.units)]
        return [*(Late(worker=lease.worker, lease_id=lease.lease_id) for lease in late), *granted]

    def next(self, work: Work) -> list[Action]:
        """Open the next round, for the rest of the run at most, and send the committed version to every member."""
        work.kind, work.opened_at = self.choose(work), work.crew.now
        work.steps = min(work.kind.steps, work.rules.num_steps - work.version)
        work.groups = self.cut(work)
        return [work.tell_version(worker) for worker in work.crew.members]


def shares_alone(num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
    """Shares of a round in which only the fastest member trains."""
    fastest = min(paces, key=lambda name: (paces[name].seconds(num_groups), name))
    return {**dict.fromkeys(paces, 0), fastest: num_groups}


def _lease(work: Work, worker: str, groups: list[range], *, count: int) -> list[Action]:
    """Lease the first `count` of the groups that this worker has not failed, and remove them from the list."""
    failed = work.failed_by(worker)
    chosen = [group for group in groups if group[0] not in failed][:count]
    taken = set(chosen)
    groups[:] = [group for group in groups if group not in taken]
    return work.grant(worker, [unit for group in chosen for unit in group])


def _probing(work: Work, planned: Mapping[str, int]) -> dict[str, int]:
    """Shares of a new round that also measure members without a share now and then: a slow one may be faster now.

    Such a member gets one group of the fastest member's share if it has fewer than `MIN_MEASUREMENTS` and did not need
    too long for a version, or if it has waited for so many rounds that a group costs at most its part of `PROBE_COST`.
    """
    shares = dict(planned)
    paces, fastest = work.crew.paces(group=work.steps), max(shares, key=lambda name: (shares[name], name), default="")
    round_seconds = max((paces[name].seconds(count) for name, count in shares.items() if count), default=math.inf)
    cost = PROBE_COST / max(1, sum(share == 0 for share in shares.values()))
    for worker, member in work.crew.members.items():
        member.rounds_without = 0 if shares[worker] else member.rounds_without + 1
        rounds_for_a_group = paces[worker].seconds(1) / round_seconds
        is_new = member.measurements < MIN_MEASUREMENTS and not member.fetches_long
        due = is_new or member.rounds_without * cost >= rounds_for_a_group
        if member.rounds_without and due and shares[fastest] > 1:
            shares[fastest] -= 1
            shares[worker] = 1
            member.rounds_without = 0
    return shares
