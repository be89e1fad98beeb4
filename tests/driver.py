"""Drives a coordinator by hand, without I/O and clocks, for tests of its decisions."""

from collections.abc import Mapping
from typing import Any

from cuadrilla.link.base import Contribution, Goodbye, Hello, Lease, Stop, ToCoordinator
from cuadrilla.sync import events
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.kinds import Strategy, exact
from cuadrilla.sync.membership import Rules

EXACT = exact()


def rules(**changes: object) -> Rules:
    return Rules(**{"units_per_step": 8, "step_tokens": 80, "num_steps": 3, **changes})  # type: ignore[arg-type]


def machine(limits: Rules, *, strategy: Strategy = EXACT, state: Mapping[str, Any] | None = None) -> Coordinator:
    """The coordinator of a strategy, new or restored from a snapshot."""
    return Coordinator(rules=limits, rounds=strategy.rounds(), state=state)


class Crew:
    """Drives a coordinator: keeps the open leases, answers them, and lets every merge succeed or fail.

    `now` is the virtual time. An answer comes a number of seconds after its lease, or now if that time has passed.
    """

    def __init__(self, machine: Coordinator) -> None:
        self.machine = machine
        self.now = 0.0
        self.leases: dict[int, events.Grant] = {}
        self.granted_at: dict[int, float] = {}
        self.commits: list[events.Commit] = []
        self.evicted: list[events.Send] = []
        self.discarded: list[int] = []
        self.late: list[str] = []
        self.do(machine.start())

    def do(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Send(worker=worker, message=Lease() as lease):
                    self._abandon(worker)
                    self.leases[lease.lease_id] = events.Grant(
                        lease_id=lease.lease_id, worker=worker, units=lease.units
                    )
                    self.granted_at[lease.lease_id] = self.now
                case events.Send(message=Stop()):
                    self.evicted.append(action)
                case events.Merge():
                    self.merge(action)
                    self.send(events.Merged())
                case events.Commit():
                    self.commits.append(action)
                case events.Late():
                    self.late.append(action.worker)
                case events.Discard():
                    self.discarded.append(action.lease_id)

    def merge(self, action: events.Merge) -> None:
        """Called for every merge; here it succeeds."""

    def contribution(self, grant: events.Grant, *, valid: bool) -> Contribution:
        return Contribution(
            lease_id=grant.lease_id, tokens=10 * len(grant.units), loss_sum=1.0, tensors={}, valid=valid
        )

    def _abandon(self, worker: str) -> None:
        """Forget the leases of a worker that the coordinator has revoked; it stops them when it gets another."""
        wanted = {lease.lease_id for lease in self.machine.work.leases.values()}
        self.leases = {id_: lease for id_, lease in self.leases.items() if lease.worker != worker or id_ in wanted}

    def send(self, event: events.Event) -> None:
        self.do(self.machine.handle(event, self.now))

    def say(self, worker: str, message: ToCoordinator) -> None:
        self.send(events.Received(worker=worker, message=message))

    def join(self, worker: str, speed: float = 1.0, **environment: str) -> None:
        self.say(worker, Hello(speed_hint=speed, environment=environment))

    def answer(self, lease_id: int, *, valid: bool = True, worker: str = "", seconds: float = 1.0) -> None:
        grant = self.leases.pop(lease_id)
        self.now = max(self.now, self.granted_at[lease_id] + seconds)
        self.say(worker or grant.worker, self.contribution(grant, valid=valid))

    def lose(self, worker: str) -> None:
        self.leases = {k: v for k, v in self.leases.items() if v.worker != worker}
        self.say(worker, Goodbye(reason="test"))

    def of(self, worker: str) -> events.Grant:
        return next(grant for grant in self.leases.values() if grant.worker == worker)

    def round(self, **seconds_per_unit: float) -> float:
        """Let all workers answer, each with its seconds per unit. Returns the seconds that the round took."""
        took = {g.worker: len(g.units) * seconds_per_unit[g.worker] for g in self.leases.values()}
        for lease_id, grant in sorted(self.leases.items(), key=lambda item: took[item[1].worker]):
            self.answer(lease_id, seconds=took[grant.worker])
        return max(took.values())
