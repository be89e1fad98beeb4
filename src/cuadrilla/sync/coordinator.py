"""The coordinator as a state machine: `handle(event, now) -> actions`, without I/O, clock, threads or chance.

A round is a fixed set of units. The coordinator leases them to its members in proportion to their measured speed,
takes the answers, and when every unit of the round is counted asks for a merge, which commits the next version.

    Joined ─▶ member ─▶ SendLease ─▶ Answered ─▶ (all units counted) ─▶ Merge ─▶ Merged ─▶ Commit ─▶ next round
    Left, or silence noticed at a Tick: its units go back and are leased to the others
    a lease that is late while others are idle: its units are leased to them, too; the first answer counts

How fast a member is, is measured by this machine's clock, from the lease to the answer. Of what a member says about
itself only how that time divides into computing and transfer is used, within bounds.

Invariants: each unit of a committed round was counted exactly once or skipped for a logged reason (I1); the version
never decreases (I4); the units of a round do not depend on who is there (I6); the same events give the same actions.
A contribution with a non-finite value is computed again, one unit at a time, by another member if there is one. A
unit that fails twice is skipped as bad data; a member whose failures others could compute is evicted at the second, and
stays away for a while that doubles each time. That, and how long it held what it did not answer, is remembered of a
name over its sessions: leaving and coming back makes nobody new.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from cuadrilla.plan.share import Pace, finish_seconds, share_units
from cuadrilla.sync.events import (
    Action,
    Answered,
    Commit,
    Discard,
    Event,
    Evict,
    Finish,
    Heard,
    Joined,
    Late,
    Left,
    Merge,
    Merged,
    SendLease,
    SendVersion,
    StopRequested,
    Tick,
)
from cuadrilla.sync.ledger import Grant, Ledger

MAX_FAILURES_OF_A_UNIT = 2
MAX_STRIKES_OF_A_WORKER = 2
MAX_DOUBLINGS = 10
"""Of the quarantine: with its 10 minutes, a week."""
FREE_OWED_SECONDS, OWED_SHARE = 30.0, 0.1
"""So long, and such a part of the time since it first came, a worker may hold leases that it does not answer. One that
has held more gets what was found of its speed when it comes back, and none of the units that are left over."""
SPEED_MEMORY = 0.5
MIN_MEASUREMENTS = 2
"""The first answer of a member tells little: caches are cold, code is compiled."""
PROBE_COST = 0.05
"""Part of the time that may go into measuring members again whose share is no unit."""
MAX_TRANSFER_SHARE = 0.9
"""Of the time to an answer: a member that claims more would look faster than it can be shown to be."""
MIN_LATE_SECONDS = 0.5
UNKNOWN_LATE_SECONDS = 30.0
"""Of a lease, as long as nobody was measured."""
FIRST_PROGRESS_SECONDS = 600.0
"""A worker's first pass may compile its model; a member that nothing is known of yet may take as long."""
MIN_OVERDUE_SECONDS, MAX_OVERDUE_SECONDS = 600.0, 6 * 3600.0
"""No lease lasts longer, however long its work was thought to take and whatever progress is claimed."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What holds for a whole run. Timeouts of None: the door itself reports deaths (threads of one process)."""

    units_per_round: int
    num_versions: int
    gather: int = 1
    """So many members are waited for before the first lease, but no longer than `gather_seconds` after the first: the
    first one would get the whole round, however slow it is."""
    gather_seconds: float = 15.0
    program: Mapping[str, str] = field(default_factory=dict)
    """What the environment of every member must say: the version of cuadrilla, the model's code."""
    same_environment: bool = False
    staleness: int = 0
    """See `sync/server.py`."""
    lost_after_seconds: float | None = None
    hung_after_seconds: float | None = None
    hung_after_leases: float = 3.0
    """Times as long as its lease should take; units are counted by the pass, and a pass may hold all of them."""
    late_after_leases: float = 1.5
    """Whose lease takes so many times as long as it should is late: members that are idle try it, too."""
    overdue_after_leases: float = 20.0
    quarantine_seconds: float = 600.0


@dataclass(kw_only=True)
class Member:
    """`hint`: the speed it claims, in any unit; `units_per_second`: a running mean of what was measured, 0 before.

    `passes`: the worker's own count of work done. `rounds_without`: since it was given its last unit. `moved`: it has
    made progress or answered since its last lease but one: hanging begins anew with a lease.
    """

    hint: float
    units_per_second: float = 0.0
    transfer_seconds: float = 0.0
    measurements: int = 0
    rounds_without: int = 0
    granted_at: float = 0.0
    moved: bool = True
    heard_at: float
    progress_at: float
    passes: int = 0


@dataclass(kw_only=True)
class Record:
    """What is remembered of a worker until the coordinator ends.

    `since`: when it first came. `strikes`: rounds in which it failed what others could. `owed_seconds`: how long
    it held leases that it did not answer, or too late. `last`: the member that it was.
    """

    since: float
    strikes: int = 0
    quarantined_until: float = -math.inf
    owed_seconds: float = 0.0
    last: Member | None = None


@dataclass(kw_only=True)
class Coordinator:
    """See the module. `snapshot` and `restore` carry what outlives the process: members and leases do not."""

    rules: Rules
    version: int = 0
    tokens: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    members: dict[str, Member] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    answers: dict[int, tuple[Answered, Grant]] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    environment: dict[str, str] | None = None
    finished: bool = False
    farewell: str = "the run has ended"
    """Why it is finished: also for those who were not there when the others were told."""
    merging: Merge | None = None
    now: float = 0.0
    gathering_since: float | None = None
    gathered: bool = False
    departed: set[str] = field(default_factory=set)

    def handle(self, event: Event, now: float) -> list[Action]:
        """The one entry. `now` is monotonic seconds of the receiver's own clock."""
        self.now = now
        if self.finished:
            return [Evict(worker=event.worker, reason=self.farewell)] if isinstance(event, Joined) else []
        match event:
            case Joined():
                return self._join(event, now)
            case Left():
                return self._remove(event.worker)
            case Heard():
                return self._hear(event, now)
            case Answered():
                return self._take_answer(event, now)
            case Merged():
                return self._after_merge(event)
            case Tick():
                return [*self._evict_silent(now), *self._deal()]
            case StopRequested():
                self.finished, self.farewell = True, event.reason
                return [Finish(reason=event.reason, complete=False)]

    def start(self) -> list[Action]:
        """Open the first round; called once, before any event."""
        if self.version >= self.rules.num_versions:
            self.finished = True
            return [Finish(reason="the run is complete", complete=True)]
        if self.ledger.outstanding == 0:
            self.ledger.open_units(self.rules.units_per_round)
        return []

    def snapshot(self) -> dict[str, Any]:
        """The committed state: a round in progress is written as not begun."""
        ledger = self.ledger.snapshot()
        uncommitted = {unit for _, grant in self.answers.values() for unit in grant.units} | self.skipped
        return {
            "version": self.version,
            "tokens": self.tokens,
            "ledger": {**ledger, "free": sorted(uncommitted.union(ledger["free"]))},
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], *, rules: Rules) -> Self:
        ledger = Ledger.restore(state["ledger"])
        return cls(rules=rules, version=state["version"], tokens=state["tokens"], ledger=ledger)

    # -- membership ------------------------------------------------------------------------------------------------

    def _join(self, event: Joined, now: float) -> list[Action]:
        actions = self._remove(event.worker) if event.worker in self.members else []
        if reason := self._unsuitable(event):
            self._depart(event.worker)
            return [*actions, Evict(worker=event.worker, reason=reason, refused=True), *self._deal()]
        self.departed.discard(event.worker)
        self.members[event.worker] = Member(hint=event.speed_hint, heard_at=now, progress_at=now)
        self._remember(event.worker)
        return [*actions, *self._welcome(event.worker), *self._deal()]

    def _unsuitable(self, event: Joined) -> str:
        """Why this worker cannot be a member; in strict mode the first one says what the others must be like."""
        record = self.records.get(event.worker)
        if record is not None and record.quarantined_until > self.now:
            minutes = math.ceil((record.quarantined_until - self.now) / 60)
            return f"quarantined for {minutes} more min: unusable contributions in {record.strikes} rounds"
        if different := _differing(self.rules.program, event.environment):
            return f"another program than the coordinator's: {', '.join(different)}; all need the same version"
        if self.rules.same_environment:
            if self.environment is None:
                self.environment = dict(event.environment)
            if different := _differing(self.environment, event.environment, also_new=True):
                return f"strict mode needs equal machines; different here: {', '.join(different[:3])}"
        return ""

    def _welcome(self, worker: str) -> list[Action]:
        return [SendVersion(worker=worker, version=self.version)]

    def _remember(self, worker: str) -> None:
        """A new member is what it was, if that was too often away with what it should have answered."""
        record = self.records.setdefault(worker, Record(since=self.now))
        if record.last is not None and self._owes(worker):
            member = self.members[worker]
            member.units_per_second, member.transfer_seconds = record.last.units_per_second, 0.0
            member.measurements = MIN_MEASUREMENTS

    def _owes(self, worker: str) -> bool:
        record = self.records[worker]
        return record.owed_seconds > FREE_OWED_SECONDS + OWED_SHARE * (self.now - record.since)

    def _remove(self, worker: str) -> list[Action]:
        self._depart(worker)
        if worker not in self.members:
            return [] if self.gathered else self._deal()
        self._dismiss(worker)
        return self._deal()

    def _dismiss(self, worker: str) -> None:
        for lease in self.ledger.release(worker):
            self._unanswered(lease)
        self.records[worker].last = self.members.pop(worker)

    def _unanswered(self, lease: Grant) -> None:
        """Its worker is no faster than that shows."""
        member, held = self.members[lease.worker], self.now - self.members[lease.worker].granted_at
        self.records[lease.worker].owed_seconds += held
        at_most = len(lease.units) / max(held, MIN_LATE_SECONDS)
        if not member.units_per_second or at_most < member.units_per_second:
            member.units_per_second = at_most

    def _depart(self, worker: str) -> None:
        """It is not waited for any more."""
        if not self.gathered:
            self.departed.add(worker)

    def _hear(self, event: Heard, now: float) -> list[Action]:
        member = self.members.get(event.worker)
        if member is None:
            return [Evict(worker=event.worker, reason="not a member of this run any more", again=True)]
        member.heard_at = now
        if event.passes > member.passes:
            member.passes = event.passes
            member.progress_at, member.moved = now, True
        return []

    def _evict_silent(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for worker, member in list(self.members.items()):
            reason = self._silence(worker, member, now)
            if reason:
                actions.append(Evict(worker=worker, reason=reason, again=True))
                actions.extend(self._remove(worker))
        return actions

    def _silence(self, worker: str, member: Member, now: float) -> str:
        """Why a member is not waited for any more; "" while it is."""
        rules = self.rules
        if rules.lost_after_seconds is not None and now - member.heard_at > rules.lost_after_seconds:
            return f"lost: nothing heard for {now - member.heard_at:.1f} s"
        lease = next((lease for lease in self.ledger.leases.values() if lease.worker == worker), None)
        if rules.hung_after_seconds is None or lease is None:
            return ""
        idle, held = now - member.progress_at, now - member.granted_at
        expected = self._expected_seconds(lease)
        known = held - idle if math.isinf(expected) else expected  # how long it took to its last progress
        limit = max(rules.hung_after_seconds, rules.hung_after_leases * known)
        if idle > (limit if member.passes else max(limit, FIRST_PROGRESS_SECONDS)):
            return f"hung: no progress for {idle:.1f} s"
        overdue = min(max(MIN_OVERDUE_SECONDS, rules.overdue_after_leases * expected), MAX_OVERDUE_SECONDS)
        return f"overdue: no answer for {held:.1f} s" if held > overdue else ""

    def _expected_seconds(self, lease: Grant) -> float:
        """From its grant to its answer; infinite as long as nobody was measured."""
        if not any(member.measurements for member in self.members.values()):
            return math.inf
        return self.paces()[lease.worker].seconds(len(lease.units))

    # -- leases ----------------------------------------------------------------------------------------------------

    def _deal(self) -> list[Action]:
        """Lease free units to members that hold none, each its share; suspect units one at a time."""
        if self.merging is not None or not self._has_gathered():
            return []
        idle, free = self._idle(), self.ledger.free
        if not idle or not free:
            return self._share_late(idle)
        fresh_round = not (self.ledger.leases or self.answers or self.failures)
        actions: list[Action] = []
        shares = self._probing(share_units(len(free), paces=self.paces()), begins=fresh_round)
        for worker in idle:
            count = 1 if self.failures.keys() & self.ledger.free else shares[worker]
            actions.extend(self._grant(worker, count, exclude=self._failed_by(worker)))
        if self.ledger.free and not self.ledger.leases:  # all of them failed these units: once more
            actions.extend(self._grant(idle[0], 1))
        return actions

    def _idle(self) -> list[str]:
        """Members that hold no lease, the fastest first."""
        busy, speeds = {lease.worker for lease in self.ledger.leases.values()}, self.speeds()
        return sorted((name for name in self.members if name not in busy), key=lambda name: (-speeds[name], name))

    def _failed_by(self, worker: str) -> set[int]:
        """Units that are to be computed by another, if there is one."""
        return {unit for unit, failed in self.failures.items() if worker in failed and len(self.members) > 1}

    def _grant(self, worker: str, count: int, *, exclude: Iterable[int] = ()) -> list[Action]:
        grant = self.ledger.grant(worker, count, version=self.version, exclude=exclude)
        return self._send(grant) if grant is not None else []

    def _send(self, grant: Grant) -> list[Action]:
        member = self.members[grant.worker]
        member.granted_at = self.now
        if member.moved:  # it may have been idle for long; but one that never answers is no less hung for a new lease
            member.progress_at, member.moved = self.now, False
        return [SendLease(grant=grant)]

    def _share_late(self, idle: Sequence[str]) -> list[Action]:
        """Units of late leases are leased to those who have nothing to do, too: whose answer comes first counts."""
        late = [lease for lease in self.ledger.leases.values() if idle and self._is_late(lease)]
        units = sorted(self.ledger.held_once() & {unit for lease in late for unit in lease.units})
        if not units:
            return []
        paces, granted = self.paces(), list[Action]()
        shares = share_units(len(units), paces={worker: paces[worker] for worker in idle})
        for worker in idle:
            chosen = [unit for unit in units if unit not in self._failed_by(worker)][: shares[worker]]
            if chosen:
                units = [unit for unit in units if unit not in chosen]
                granted.extend(self._send_again(worker, chosen))
        return [*(Late(worker=lease.worker, lease_id=lease.lease_id) for lease in late), *granted] if granted else []

    def _send_again(self, worker: str, units: Sequence[int]) -> list[Action]:
        return self._send(self.ledger.grant_again(worker, units, version=self.version))

    def _is_late(self, lease: Grant) -> bool:
        member, expected = self.members[lease.worker], self._expected_seconds(lease)
        if math.isinf(expected):  # what it took to its last progress is all that is known
            known = max(0.0, member.progress_at - member.granted_at)
            limit = max(UNKNOWN_LATE_SECONDS, self.rules.hung_after_leases * known)
        else:
            limit = max(MIN_LATE_SECONDS, self.rules.late_after_leases * expected)
        return self.now - member.granted_at > limit

    def _has_gathered(self) -> bool:
        if not self.gathered and self.members:
            since = self.gathering_since = self.now if self.gathering_since is None else self.gathering_since
            expected = self.rules.gather - len(self.departed)
            self.gathered = len(self.members) >= expected or self.now - since >= self.rules.gather_seconds
        return self.gathered

    def _probing(self, shares: dict[str, int], *, begins: bool) -> dict[str, int]:
        """Shares in which nobody is forgotten: who was slow once may be fast now.

        At the beginning of a round a member whose share is no unit gets one of the fastest member's, if it was not
        measured properly yet or has waited so long that the wait costs at most PROBE_COST of the time. Units that come
        back during a round go to whoever is idle.
        """
        if not begins or not self.ledger.free:
            return {worker: max(0 if self._owes(worker) else 1, count) for worker, count in shares.items()}
        shares = dict(shares)
        paces, fastest = self.paces(), max(shares, key=lambda name: (shares[name], name), default="")
        round_seconds = finish_seconds(len(self.ledger.free), paces=paces)
        for worker, member in self.members.items():
            member.rounds_without = 0 if shares[worker] else member.rounds_without + 1
            rounds_for_a_unit = paces[worker].seconds(1) / round_seconds
            due = member.measurements < MIN_MEASUREMENTS or member.rounds_without * PROBE_COST >= rounds_for_a_unit
            if member.rounds_without and due and shares[fastest] > 1:
                shares[fastest] -= 1
                shares[worker] = 1
                member.rounds_without = 0
        return shares

    def speeds(self) -> dict[str, float]:
        """Units per second of each member; one not measured yet counts as its hint beside the measured ones'."""
        measured = [member for member in self.members.values() if member.units_per_second]
        scale = sum(m.units_per_second for m in measured) / sum(m.hint for m in measured) if measured else 1.0
        return {
            name: member.units_per_second or max(member.hint * scale, 1e-9) for name, member in self.members.items()
        }

    def paces(self) -> dict[str, Pace]:
        """What a round costs each member."""
        return {
            name: Pace(units_per_second=speed, fixed_seconds=self.members[name].transfer_seconds)
            for name, speed in self.speeds().items()
        }

    def _take_answer(self, event: Answered, now: float) -> list[Action]:
        grant = self.ledger.count(event.lease_id, worker=event.worker)
        if event.worker in self.members:
            self.members[event.worker].heard_at = now  # also by an answer that is of no use
        if grant is None:
            return [Discard(lease_id=event.lease_id)]
        member = self.members[event.worker]
        member.progress_at, member.moved = now, True
        if not event.valid:
            self._fail(grant)
            return [Discard(lease_id=event.lease_id), *self._deal(), *self._close_round()]
        self._measure(member, len(grant.units), seconds=now - member.granted_at, transfer=event.transfer_seconds)
        self.answers[event.lease_id] = (event, grant)
        self._void(grant.units)
        return [*self._deal(), *self._close_round()]

    def _measure(self, member: Member, num_units: int, *, seconds: float, transfer: float) -> None:
        """`seconds`: from lease to answer, by our clock; `transfer`: how much of it went to weights and gradients."""
        if seconds <= 0:
            return
        transfer = min(transfer, MAX_TRANSFER_SHARE * seconds)
        memory = SPEED_MEMORY if member.measurements else 0.0
        member.units_per_second += (1 - memory) * (num_units / (seconds - transfer) - member.units_per_second)
        member.transfer_seconds += (1 - memory) * (transfer - member.transfer_seconds)
        member.measurements += 1

    def _void(self, units: Iterable[int]) -> None:
        """Nobody else's answer for these units is wanted."""
        for lease in self.ledger.void(units):
            self._unanswered(lease)

    def _fail(self, grant: Grant) -> None:
        """Units of a bad contribution: computed again, skipped when they failed before one at a time."""
        self.ledger.uncount(grant.units)
        for unit in grant.units:
            failed = self.failures.setdefault(unit, [])
            failed.append(grant.worker)
            if len(failed) >= MAX_FAILURES_OF_A_UNIT and len(grant.units) == 1:
                self.ledger.skip([unit])
                self.ledger.void([unit])
                self.skipped.add(unit)

    def _close_round(self) -> list[Action]:
        return [] if self.ledger.outstanding or self.merging is not None else [self._merge()]

    def _merge(self, *, staleness: int | None = None) -> Merge:
        ordered = sorted(self.answers.values(), key=lambda item: item[1].units[0])
        units = tuple(sorted({unit for _, grant in ordered for unit in grant.units} | self.skipped))
        self.merging = Merge(
            version=self.version + 1,
            answers=tuple(answer for answer, _ in ordered),
            units=units,
            skipped=tuple(sorted(self.skipped)),
            tokens_before=self.tokens,
            staleness=staleness,
        )
        return self.merging

    def _after_merge(self, event: Merged) -> list[Action]:
        merge, self.merging = self.merging, None
        assert merge is not None, "Merged without a Merge"
        if event.bad_leases:
            return self._recompute(event.bad_leases)
        for unit in event.blameless:
            self.failures.pop(unit, None)
        actions: list[Action] = list(self._strike(merge))
        self.version = merge.version
        self.tokens += sum(answer.tokens for answer in merge.answers)
        actions.append(Commit(merge=merge, tokens=self.tokens))
        self.answers.clear()
        self.skipped.clear()
        for unit in merge.units:
            self.failures.pop(unit, None)
        if self.version >= self.rules.num_versions:
            self.finished = True
            return [*actions, Finish(reason="the run is complete", complete=True)]
        return [*actions, *self._next_round(event), *self._deal()]

    def _next_round(self, event: Merged) -> list[Action]:
        del event
        self.ledger.open_units(self.rules.units_per_round)
        return [SendVersion(worker=worker, version=self.version) for worker in self.members]

    def _recompute(self, bad_leases: tuple[int, ...]) -> list[Action]:
        actions: list[Action] = []
        for lease_id in bad_leases:
            _, grant = self.answers.pop(lease_id)
            self._fail(grant)
            actions.append(Discard(lease_id=lease_id))
        return [*actions, *self._deal(), *self._close_round()]

    def _strike(self, merge: Merge) -> list[Action]:
        """A worker failed units that others could compute: from the second such round on it is sent away."""
        blameless = {worker for unit in merge.skipped for worker in self.failures.get(unit, ())}
        guilty = {worker for unit in merge.units for worker in self.failures.get(unit, ())} - blameless
        actions: list[Action] = []
        for worker in sorted(guilty & self.records.keys()):
            record = self.records[worker]
            record.strikes += 1
            more = record.strikes - MAX_STRIKES_OF_A_WORKER
            if more < 0 or not self.members.keys() - {worker}:
                continue
            seconds = self.rules.quarantine_seconds * 2 ** min(more, MAX_DOUBLINGS)
            record.quarantined_until = self.now + seconds
            if worker in self.members:
                self._dismiss(worker)
                reason = f"sent unusable contributions: quarantined for {seconds / 60:.0f} min"
                actions.append(Evict(worker=worker, reason=reason, refused=True))
        return actions


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str], *, also_new: bool = False) -> list[str]:
    """What is other there than here; `also_new`: what is only known there, too."""
    return [
        f"{key} ({theirs.get(key, 'none')} instead of {ours.get(key, 'none')})"
        for key in sorted(ours.keys() | (theirs.keys() if also_new else set()))
        if ours.get(key) != theirs.get(key)
    ]
