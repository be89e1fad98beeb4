"""The work of a run, and the rule by which it is leased.

`Work` knows which units are free, leased, answered, failed or skipped, and offers the operations; `Rounds` decides
which of them happen, and when a version is due. A round is a fixed set of units, shared among the members so that all
are done at the same time.
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
"""In place of a round's steps, of which 1 is an exact one."""
MAX_FAILURES_OF_A_UNIT = 2
PROBE_COST = 0.02
"""At most this part of the time, for all members together, measures those again whose share is no unit."""
MIN_LATE_SECONDS = 0.5
UNKNOWN_LATE_SECONDS = 30.0
"""After this a lease is late, as long as no speed is known."""


@dataclass(kw_only=True)
class Work:
    """`answers` wait for their merge; `failures`: who failed a unit; `skipped`: units that nobody can compute;
    `merged_steps`: of the last version; `parts`: optimizer steps in one of the run's, for who has the whole round;
    `opened_at`: when the round was opened; `merge_seconds`: a running mean, from the last answer of a round to its
    version.
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
        """Put the next units of the run on offer: so many optimizer steps, or fewer up to its end."""
        self.parts = parts
        self.ledger.open_units(min(steps, self.rules.num_steps - self.version) * self.rules.units_per_step)
        self.opened_at = self.crew.now

    # -- leases --------------------------------------------------------------------------------------------------------

    def idle(self) -> list[str]:
        """Members that hold no lease, in the order in which they stand."""
        busy = {lease.worker for lease in self.ledger.leases.values()}
        return [worker for worker in self.crew.members if worker not in busy]

    def failed_by(self, worker: str) -> set[int]:
        """Units that are to be computed by another node, if there is one; else by another device, if there is one."""
        own = self.crew.of_node(worker)
        if own == self.crew.members.keys():
            own = {worker} if len(own) > 1 else set()
        return {unit for unit, failed in self.failures.items() if not own.isdisjoint(failed)}

    def grant(self, worker: str, count: int, *, exclude: Iterable[int] = ()) -> list[Action]:
        """Lease the first `count` free units; nothing if there is none."""
        units = sorted(self.ledger.free.difference(exclude))[:count]
        return self.grant_units(worker, units) if units else []

    def grant_units(self, worker: str, units: Sequence[int]) -> list[Action]:
        """Lease these units, which another worker may hold as well."""
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
        """The one that was committed last."""
        return Send(worker=worker, message=Version(version=self.version, next_round_steps=self.steps))

    def late(self) -> list[Grant]:
        """Leases that take longer than they should."""
        return [lease for lease in self.ledger.leases.values() if self._is_late(lease)]

    def _is_late(self, lease: Grant) -> bool:
        member, expected = self.crew.members[lease.worker], self.crew.expected_seconds(lease)
        if math.isinf(expected):  # what it took to its last progress is all that is known
            known = max(0.0, member.progress_at - lease.at)
            limit = max(UNKNOWN_LATE_SECONDS, self.rules.hung_factor * known)
        else:
            limit = max(MIN_LATE_SECONDS, self.rules.late_factor * expected)
        return self.crew.now - lease.at > limit

    # -- answers -------------------------------------------------------------------------------------------------------

    def revoke(self, units: Iterable[int]) -> None:
        """Nobody else's answer for these units is wanted."""
        self.crew.note_revoked(self.ledger.revoke(units))

    def fail(self, grant: Grant, *, is_smallest: bool) -> None:
        """Its contribution cannot be used: its units are computed again; skipped if the smallest lease of them failed
        so often.
        """
        self.ledger.uncounted.update(grant.units)
        for unit in grant.units:
            self.failures.setdefault(unit, []).append(grant.worker)
        if is_smallest and len(self.failures[grant.units[0]]) >= MAX_FAILURES_OF_A_UNIT:
            self.skip(grant.units)

    def skip(self, units: Sequence[int]) -> None:
        """They are counted as empty."""
        self.ledger.uncounted.difference_update(units)
        self.ledger.revoke(units)
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
        """Workers that failed units of this version which others could compute."""
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
    """Each version is made of all units of its round, whoever computed them. Units are dealt out in groups of as
    many as a round has optimizer steps: `steps`. Strategies have subclasses with rules of their own.
    """

    steps: int = 1

    def deal(self, work: Work) -> list[Action]:
        """Lease free units to members that hold none, each its share; suspect units one group at a time."""
        free = work.ledger.free
        speeds = work.crew.speeds()
        idle = sorted(work.idle(), key=lambda name: (-speeds[name], name))
        if not idle or not free:
            return self._back_up_late(work, idle)
        fresh_round = not (work.ledger.leases or work.answers or work.failures)
        actions: list[Action] = []
        size = work.steps
        shares = self.shares(math.ceil(len(free) / size), paces=_paces_of_groups(work))
        shares = _probing(work, shares) if fresh_round else shares
        for worker in idle:
            count = shares[worker] if fresh_round else max(1, shares[worker])  # returned units go to all idle ones
            count = 1 if work.failures.keys() & work.ledger.free else count
            actions.extend(work.grant(worker, size * count, exclude=work.failed_by(worker)))
        if work.ledger.free and not work.ledger.leases:  # all of them failed these units: once more
            actions.extend(work.grant(idle[0], size))
        return actions

    def _back_up_late(self, work: Work, idle: Sequence[str]) -> list[Action]:
        """Units of late leases are leased to those who have nothing to do, too: whose answer comes first counts."""
        late = work.late() if idle else []
        units = sorted(work.ledger.held_by_one() & {unit for lease in late for unit in lease.units})
        if not units:
            return []
        size, paces, granted = work.steps, _paces_of_groups(work), list[Action]()
        shares = share_units(math.ceil(len(units) / size), paces={worker: paces[worker] for worker in idle})
        for worker in idle:
            chosen = [unit for unit in units if unit not in work.failed_by(worker)][: size * shares[worker]]
            if chosen:
                units = [unit for unit in units if unit not in chosen]
                granted.extend(work.grant_units(worker, chosen))
        return [*(Late(worker=lease.worker, lease_id=lease.lease_id) for lease in late), *granted] if granted else []

    def due(self, work: Work) -> Merge | None:
        """The next version, if it can be made of the answers that are here."""
        return None if work.ledger.uncounted else work.merge()

    def is_smallest(self, grant: Grant, work: Work) -> bool:
        """Whether its units are never leased in smaller parts."""
        return len(grant.units) <= work.steps

    def shares(self, num_groups: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
        """Groups of a round for each member."""
        return share_units(num_groups, paces=paces)

    @property
    def kind(self) -> int:
        """Steps of a round; ALONE: of the fastest machine by itself."""
        return self.steps

    def length(self, work: Work) -> int:
        """Steps of the next round."""
        del work
        return self.steps

    def parts(self, work: Work) -> int:
        """Optimizer steps in one of the run's, for a member that has the next round to itself."""
        del work
        return 1

    def next(self, work: Work) -> list[Action]:
        """A version was committed, and the run goes on."""
        work.open_round(self.length(work), parts=self.parts(work))
        return [work.tell_version(worker) for worker in work.crew.members]


def _paces_of_groups(work: Work) -> dict[str, Pace]:
    size = work.steps
    return {
        worker: Pace(units_per_second=pace.units_per_second / size, fixed_seconds=pace.fixed_seconds)
        for worker, pace in work.crew.paces().items()
    }


def _probing(work: Work, planned: Mapping[str, int]) -> dict[str, int]:
    """Shares of a new round in which nobody is forgotten: who was slow once may be fast now.

    A member whose share is nothing gets a group of the fastest member's, if it was not measured properly yet or has
    waited so long that the wait costs at most its part of PROBE_COST.
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
