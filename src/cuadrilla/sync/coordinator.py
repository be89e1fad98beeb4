"""The coordinator as a state machine: `handle(event, now) -> actions`, without I/O, clock, threads or chance.

It consists of the members (`membership.py`), the units and leases (`work.py`), and the strategy's rule of rounds, which
decides what is leased to whom.

    Hello ─▶ member ─▶ Lease ─▶ Contribution ─▶ (a version is due) ─▶ Merge ─▶ Merged ─▶ Commit ─▶ next round
    Goodbye, or silence noticed at a Tick: the member's units are free again and are leased to others
    a lease is late while members are idle: they get its units as well, and the first answer counts

Invariants: each unit of a committed version was counted exactly once or skipped for a logged reason (I1); the version
never decreases (I4); the units of a round do not depend on its members (I6); the same events give the same actions.
Units whose contribution holds a non-finite value are computed again, by another member if there is one. Units that fail
twice are skipped as bad data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from cuadrilla.link.base import Contribution, Goodbye, Hello, Progress, Stop, ToCoordinator
from cuadrilla.messages import Message
from cuadrilla.sync.events import Action, Answer, Commit, Discard, Event, Finish, Grant, Merged, Received, Send, Tick
from cuadrilla.sync.membership import BANNED, Membership, Rules
from cuadrilla.sync.work import Rounds, Work


@dataclass(kw_only=True)
class Coordinator:
    """The state machine of the module docstring. `state`: an earlier `snapshot`, if the run has begun. It is all that
    outlives the process: members and leases do not. `finished`: set from outside, too, where the run stops before its
    last step.
    """

    rules: Rules
    rounds: Rounds
    state: InitVar[Mapping[str, Any] | None] = None
    crew: Membership = field(init=False)
    work: Work = field(init=False)
    finished: bool = False

    def __post_init__(self, state: Mapping[str, Any] | None) -> None:
        self.crew = Membership(rules=self.rules)
        version, tokens = (state["version"], state["tokens"]) if state else (0, 0)
        self.work = Work(rules=self.rules, crew=self.crew, version=version, tokens=tokens)

    @property
    def version(self) -> int:
        return self.work.version

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide on an event. `now`: monotonic seconds of the coordinator's clock."""
        self.crew.now = now
        match event:
            case Received(message=Hello()) if self.finished:
                return [Send(worker=event.worker, message=Stop(reason=Message("the run has ended")))]
            case _ if self.finished:
                return []
            case Received():
                return self._hear(event.worker, event.message)
            case Merged():
                return self._after_merge(event)
            case Tick():
                return [*self._evict_unresponsive(), *self._go_on()]

    def start(self) -> list[Action]:
        """Open the next round, or end the run after its last step. Its owner calls it once, before any event."""
        if self.work.version >= self.rules.num_steps:
            self.finished = True
            return [Finish()]
        return [*self.rounds.next(self.work), *self._go_on()]

    def postpone(self, seconds: float) -> None:
        """Let the open round and its leases begin later: the last actions were delayed by this many seconds."""
        leases, self.work.opened_at = self.work.leases, self.work.opened_at + seconds
        leases.update({worker: replace(lease, at=lease.at + seconds) for worker, lease in leases.items()})

    def snapshot(self) -> dict[str, Any]:
        """The committed state, without the round in progress."""
        return {"version": self.work.version, "tokens": self.work.tokens}

    # -- members -------------------------------------------------------------------------------------------------------

    def _hear(self, worker: str, message: ToCoordinator) -> list[Action]:
        is_member = self.crew.hear(worker, message)
        match message:
            case Hello():
                return self._join(worker, message)
            case Progress() if is_member:
                return []
            case Progress():
                return [self._send_away(worker, Message("not a member of this run any more"), again=True)]
            case Contribution():
                return self._take_answer(worker, message)
            case Goodbye():
                self._remove(worker)
                return self._go_on()

    def _join(self, worker: str, hello: Hello) -> list[Action]:
        self._remove(worker)  # it may be a member that begins anew
        if reason := self.crew.admit(worker, hello):
            return [self._send_away(worker, reason), *self._go_on()]
        return [self.work.tell_version(worker), *self._go_on()]

    def _remove(self, worker: str) -> None:
        self.crew.members.pop(worker, None)
        self.work.leases.pop(worker, None)  # its units are free again

    def _send_away(self, worker: str, reason: str, *, again: bool = False) -> Action:
        """Remove a worker. `again`: it may join again at once."""
        self._remove(worker)
        return Send(worker=worker, message=Stop(reason=reason, refused=not again, again=again))

    def _evict_unresponsive(self) -> list[Action]:
        leases = self.work.leases
        reasons = {worker: self.crew.why_evict(worker, leases.get(worker)) for worker in self.crew.members}
        return [self._send_away(worker, reason, again=True) for worker, reason in reasons.items() if reason]

    # -- answers -------------------------------------------------------------------------------------------------------

    def _take_answer(self, worker: str, said: Contribution) -> list[Action]:
        grant = self.work.take(said.lease_id, worker=worker)
        if grant is None:
            return [Discard(lease_id=said.lease_id)]
        if not said.valid:
            return self._recompute([grant])
        self.crew.measure(grant, transfer=said.transfer_seconds)
        self.work.answers[said.lease_id] = Answer(grant=grant, contribution=said)
        self.crew.note_revoked(self.work.end(grant.units))  # another answer is not wanted
        return self._go_on()

    def _go_on(self) -> list[Action]:
        """Begin the merge of the next version if every unit of the round is counted; else lease those that are free."""
        if self.work.merging is not None:
            return []
        if not self.work.uncounted:
            self.work.merging = self.work.merge()
            return [self.work.merging]
        return self.rounds.deal(self.work) if self.crew.has_quorum else []

    def _recompute(self, unusable: Sequence[Grant]) -> list[Action]:
        for grant in unusable:
            self.work.fail(grant)
        return [*(Discard(lease_id=grant.lease_id) for grant in unusable), *self._go_on()]

    def _after_merge(self, event: Merged) -> list[Action]:
        merge, self.work.merging = self.work.merging, None
        assert merge is not None, "Merged without a Merge"
        if event.bad_leases:
            return self._recompute([self.work.answers.pop(lease_id).grant for lease_id in event.bad_leases])
        for unit in event.confirmed:
            self.work.failures.pop(unit, None)
        sent_away = [self._send_away(worker, BANNED) for worker in self.crew.ban(self.work.failed_alone())]
        self.work.committed(merge)
        return [*sent_away, Commit(merge=merge), *self.start()]
