"""The coordinator as a state machine: `handle(event, now) -> actions`, without I/O, clock, threads or chance.

It consists of the members (`membership.py`), the units and leases (`work.py`), and the strategy's rule of rounds, which
decides what is leased to whom and when a version is due.

    Hello ─▶ member ─▶ Lease ─▶ Contribution ─▶ (a version is due) ─▶ Merge ─▶ Merged ─▶ Commit ─▶ next round
    Goodbye, or silence noticed at a Tick: the member's units are free again and are leased to others
    a lease is late while members are idle: they get its units as well, and the first answer counts

Invariants: each unit of a committed version was counted exactly once or skipped for a logged reason (I1); the version
never decreases (I4); the units of a round do not depend on its members (I6); the same events give the same actions.
Units whose contribution holds a non-finite value are computed again, by another member if there is one. Units that fail
twice are skipped as bad data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cuadrilla.link.base import Contribution, Goodbye, Hello, Progress, Stop, ToCoordinator
from cuadrilla.messages import Message
from cuadrilla.sync.events import (
    Action,
    Answer,
    Commit,
    Discard,
    Event,
    Finish,
    Merge,
    Merged,
    Received,
    Send,
    StopRequested,
    Tick,
)
from cuadrilla.sync.ledger import Ledger
from cuadrilla.sync.membership import BANNED, Membership, Rules
from cuadrilla.sync.work import Rounds, Work

COMPLETE = Message("the run is complete")
BEGINNING: Mapping[str, Any] = {"version": 0, "tokens": 0}
"""The snapshot of a run that has not begun."""


@dataclass(kw_only=True)
class Coordinator:
    """The state machine of the module docstring. `snapshot` and `restore` carry the state that outlives the process;
    members and leases do not. `finish_reason` is sent to workers that say Hello after the end.
    """

    rules: Rules
    rounds: Rounds
    crew: Membership = field(init=False)
    work: Work = field(init=False)
    finished: bool = False
    finish_reason: str = Message("the run has ended")

    def __post_init__(self) -> None:
        self.crew = Membership(rules=self.rules)
        self.work = Work(rules=self.rules, crew=self.crew)

    @property
    def version(self) -> int:
        return self.work.version

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide on an event. `now`: monotonic seconds of the coordinator's clock."""
        self.crew.now = now
        match event:
            case Received(message=Hello()) if self.finished:
                return [Send(worker=event.worker, message=Stop(reason=self.finish_reason))]
            case _ if self.finished:
                return []
            case Received():
                return self._hear(event.worker, event.message)
            case Merged():
                return self._after_merge(event)
            case Tick():
                return [*self._evict_unresponsive(), *self._go_on()]
            case StopRequested():
                self.finished, self.finish_reason = True, event.reason
                return [Finish(reason=event.reason, complete=False)]

    def start(self) -> list[Action]:
        """Open the first round. Called once, before any event."""
        if self.work.version >= self.rules.num_steps:
            self.finished = True
            return [Finish(reason=COMPLETE, complete=True)]
        return self.rounds.next(self.work)

    def postpone(self, seconds: float) -> None:
        """Let the open round and its leases begin later: the last actions were delayed by this many seconds."""
        leases, self.work.opened_at = self.work.ledger.leases, self.work.opened_at + seconds
        leases.update({number: replace(lease, at=lease.at + seconds) for number, lease in leases.items()})

    def snapshot(self) -> dict[str, Any]:
        """The committed state, without the round in progress."""
        return {"version": self.work.version, "tokens": self.work.tokens}

    @classmethod
    def restore(cls, state: Mapping[str, Any], *, rules: Rules, rounds: Rounds) -> Self:
        restored = cls(rules=rules, rounds=rounds)
        restored.work.version, restored.work.tokens = state["version"], state["tokens"]
        restored.work.ledger = Ledger(opened=state["version"] * rules.units_per_step)
        return restored

    def _hear(self, worker: str, message: ToCoordinator) -> list[Action]:
        match message:
            case Hello():
                return self._join(worker, message)
            case Progress():
                return self._note_progress(worker, message)
            case Contribution():
                return self._take_answer(worker, message)
            case Goodbye():
                return self._remove(worker)

    # -- members -------------------------------------------------------------------------------------------------------

    def _join(self, worker: str, hello: Hello) -> list[Action]:
        actions = self._remove(worker) if worker in self.crew.members else []
        if reason := self.crew.admit(worker, hello):
            return [*actions, Send(worker=worker, message=Stop(reason=reason, refused=True)), *self._remove(worker)]
        return [*actions, self.work.tell_version(worker), *self._go_on()]

    def _remove(self, worker: str) -> list[Action]:
        self.crew.departed.add(worker)
        if worker in self.crew.members:
            self._remove_member(worker)
        return self._go_on()

    def _remove_member(self, worker: str) -> None:
        del self.crew.members[worker]
        self.work.ledger.end(worker=worker)

    def _note_progress(self, worker: str, progress: Progress) -> list[Action]:
        if self.crew.hear(worker, progress):
            return []
        return [Send(worker=worker, message=Stop(reason=Message("not a member of this run any more"), again=True))]

    def _evict_unresponsive(self) -> list[Action]:
        actions, held = list[Action](), {lease.worker: lease for lease in self.work.ledger.leases.values()}
        for worker in list(self.crew.members):
            if reason := self.crew.why_evict(worker, held.get(worker)):
                actions.append(Send(worker=worker, message=Stop(reason=reason, again=True)))
                actions.extend(self._remove(worker))
        return actions

    # -- answers -------------------------------------------------------------------------------------------------------

    def _take_answer(self, worker: str, said: Contribution) -> list[Action]:
        grant = self.work.ledger.count(said.lease_id, worker=worker)
        if worker in self.crew.members:
            self.crew.members[worker].heard_at = self.crew.now  # an unusable answer is a sign of life, too
        if grant is None:
            return [Discard(lease_id=said.lease_id)]
        if not said.valid:
            self.work.fail(grant)
            return [Discard(lease_id=said.lease_id), *self._go_on()]
        self.crew.measure(grant, transfer=said.transfer_seconds)
        self.work.answers[said.lease_id] = Answer(grant=grant, contribution=said)
        self.crew.note_revoked(self.work.ledger.end(units=grant.units))  # another answer is not wanted
        return self._go_on()

    def _go_on(self) -> list[Action]:
        """Lease free units, and begin the merge of the next version if it is due."""
        if self.work.merging is not None:
            return []
        actions = self.rounds.deal(self.work) if self.crew.note_quorum() else []
        if (merge := self.rounds.due(self.work)) is not None:
            self.work.merging, self.work.merging_since = merge, self.crew.now
            actions = [*actions, merge]
        return actions

    def _after_merge(self, event: Merged) -> list[Action]:
        merge, self.work.merging = self.work.merging, None
        assert merge is not None, "Merged without a Merge"
        if event.bad_leases:
            return self._recompute(event.bad_leases)
        for unit in event.confirmed:
            self.work.failures.pop(unit, None)
        actions = self._ban(merge)
        self.work.committed(merge)
        actions.append(Commit(merge=merge, tokens=self.work.tokens))
        if self.work.version >= self.rules.num_steps:
            self.finished = True
            return [*actions, Finish(reason=COMPLETE, complete=True)]
        return [*actions, *self.rounds.next(self.work), *self._go_on()]

    def _recompute(self, bad_leases: tuple[int, ...]) -> list[Action]:
        actions: list[Action] = []
        for lease_id in bad_leases:
            self.work.fail(self.work.answers.pop(lease_id).grant)
            actions.append(Discard(lease_id=lease_id))
        return [*actions, *self._go_on()]

    def _ban(self, merge: Merge) -> list[Action]:
        """Remove the members of nodes whose contributions were unusable in several rounds."""
        actions: list[Action] = []
        for worker in self.crew.ban(self.work.failed_alone(merge)):
            self._remove_member(worker)
            actions.append(Send(worker=worker, message=Stop(reason=BANNED, refused=True)))
        return actions
