"""The workers' side of a simulated run: processes of unequal speed, and a network that delays messages and breaks.

Time is a heap of events; nothing here waits. Messages of one connection keep their order; those of different
connections may overtake each other. Workers do the worst that real ones may do: they finish leases that they no longer
hold, and send answers twice, over the same connection or over the next one.
"""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cuadrilla.link.base import Contribution, Goodbye, Hello, Lease, Progress, Stop, ToCoordinator, ToWorker, Version
from tests.simulate.disk import MASK, UNIT_TOKENS, Audit, SimAnswer, gradient, number_of

HEARTBEAT_SECONDS = 1.0
LEFT_OUT_SECONDS = 30.0
"""Time until a worker that was sent away for its contributions is started again."""
SLOWNESS = 10.0
RETRY_SECONDS = 1.0


class Clock:
    """Virtual time: a heap of (time, number, callback); equal times ring in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, seconds: float, call: Callable[[], None], *, place: int = 0) -> int:
        """Call later. Returns the event's place among events of the same time, which it can keep when it is put off."""
        return self.at(self.now + seconds, call, place=place)

    def at(self, when: float, call: Callable[[], None], *, place: int = 0) -> int:
        """Call at a given time. (`after(when - now)` rounds, which may change the order of two events.)"""
        if not place:
            place = self._number = self._number + 1
        heapq.heappush(self._heap, (when, place, call))
        return place

    def next(self) -> Callable[[], None]:
        """Advance the time to the next event, and return its callback."""
        self.now, _, call = heapq.heappop(self._heap)
        return call


@dataclass(eq=False)
class SimConnection:
    """A worker's connection. `blocked`: the time until which messages of a direction are held back.

    `lingers`: messages under way to the coordinator when the connection breaks still arrive, perhaps after those of the
    next connection. `stopped`: the coordinator has sent the worker away. `micro_steps`: as reported to the coordinator.
    """

    worker: "Worker"
    incarnation: int
    open: bool = True
    lingers: bool = False
    stopped: bool = False
    micro_steps: int = 0
    arrival: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    blocked: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})


@dataclass(eq=False)
class Worker:
    """A worker's process. `rate`: units per second. `incarnation`: its number, by which timers of dead ones are void.

    `heard_at`: when the coordinator last got a message from it. `owes`: it has a lease and has reported no progress or
    answer since. `worked_at`: when the coordinator last heard of progress, or sent a lease to a worker that owed none.
    `bases`: the weights that it had when each lease came.
    """

    name: str
    rate: float
    bad: bool = False
    incarnation: int = 0
    away: bool = True
    frozen_until: float = 0.0
    slow_until: float = 0.0
    connection: SimConnection | None = None
    version: int = 0
    losses: int = 0
    theta: int = 0
    micro_steps: int = 0
    leases: list[Lease] = field(default_factory=list)
    bases: dict[int, int] = field(default_factory=dict)
    answer: Contribution | None = None
    bad_rounds: set[int] = field(default_factory=set)
    worked_at: float = 0.0
    owes: bool = False
    heard_at: float = 0.0


def draw_crew(rng: random.Random) -> dict[str, Worker]:
    """Two to five workers of 0.5 to 3 units per second. Of four or five, sometimes one sends only bad contributions."""
    count = rng.randint(2, 5)
    workers = {f"w{i}": Worker(name=f"w{i}", rate=rng.uniform(0.5, 3.0)) for i in range(count)}
    workers["w0"].bad = count > 3 and rng.random() < 0.3
    return workers


class Transport(Protocol):
    """The coordinator as its workers see it. `incarnation`: the number of its current process."""

    up: bool
    incarnation: int

    def hear(self, connection: SimConnection, message: ToCoordinator) -> None: ...

    def close(self, connection: SimConnection) -> None:
        """Called when a connection has ended."""


class SimCrew:
    """All workers and their connections. `bad_unit`: its contributions are always bad (-1: no unit). `bad_rate`: the
    part of all other contributions that are bad."""

    def __init__(self, rng: random.Random, *, clock: Clock, audit: Audit, transport: Transport) -> None:
        self.random = rng
        self.clock = clock
        self.audit = audit
        self.transport = transport
        self.workers = draw_crew(rng)
        self.bad_unit = rng.choice((-1, -1, -1, -1, rng.randrange(audit.rules.units_per_step * audit.rules.num_steps)))
        self.bad_rate = rng.choice((0.0, 0.0, 0.02))

    def start(self) -> None:
        for worker in self.workers.values():
            joins_at = self.random.choice((0.0, 0.0, self.random.uniform(0.0, 15.0)))
            self.clock.after(joins_at, partial(self.begin, worker))

    # -- the network ---------------------------------------------------------------------------------------------------

    def carry(self, connection: SimConnection, direction: str, deliver: Callable[[], None]) -> None:
        """Deliver after a delay, and after what was sent before. If the connection breaks meanwhile, never deliver."""
        if not connection.open:
            return
        delay = self.random.choice((0.001, 0.01, 0.05, self.random.uniform(0.0, 0.5)))
        sent = max(self.clock.now, connection.blocked[direction])
        connection.arrival[direction] = max(connection.arrival[direction], sent + delay)

        def arrive() -> None:
            if connection.open or (connection.lingers and direction == "up"):
                deliver()

        self.clock.at(connection.arrival[direction], arrive)

    def send(self, connection: SimConnection, message: ToWorker) -> None:
        """Send a message to a worker. A frozen process reads it when it continues."""
        worker = connection.worker
        self.carry(connection, "down", lambda: self.after(worker, 0.0, partial(self.read, connection, message)))

    def tell(self, worker: Worker, message: ToCoordinator) -> None:
        connection = worker.connection
        if connection is not None:
            self.carry(connection, "up", partial(self.transport.hear, connection, message))

    def cut(self, connection: SimConnection, *, noticed_after: float, noticed: bool = True) -> None:
        """Break a connection. The worker notices it; the coordinator may not."""
        connection.open = False
        worker = connection.worker
        self.after(worker, noticed_after, partial(self.reconnect, worker, connection))
        if noticed:
            self.clock.after(self.random.uniform(0.0, 2.0), partial(self.transport.close, connection))

    # -- a worker's process --------------------------------------------------------------------------------------------

    def after(self, worker: Worker, seconds: float, call: Callable[[], None]) -> None:
        """Set a timer of a worker's process. It is void if the process has died, and late if the process is frozen."""
        incarnation = worker.incarnation

        def ring() -> None:
            if worker.incarnation != incarnation:
                return
            if self.clock.now < worker.frozen_until:
                self.clock.at(worker.frozen_until, ring, place=place)
            else:
                call()

        place = self.clock.after(seconds, ring)

    def begin(self, worker: Worker) -> None:
        """Start a new process of a worker, which knows nothing of earlier ones."""
        if worker.away:
            worker.away, worker.incarnation = False, worker.incarnation + 1
            worker.leases, worker.answer, worker.connection = [], None, None
            self.connect(worker)

    def end(self, worker: Worker, *, back_after: float, lingers: bool, noticed: bool) -> None:
        """End the process of a worker, which is started again later."""
        connection, worker.connection = worker.connection, None
        worker.away, worker.incarnation = True, worker.incarnation + 1
        if connection is not None:
            connection.open, connection.lingers = False, lingers
            if noticed:
                self.clock.after(self.random.uniform(0.0, 1.0), partial(self.transport.close, connection))
        self.clock.after(back_after, partial(self.begin, worker))

    def leave(self, worker: Worker, *, back_after: float) -> None:
        self.tell(worker, Goodbye(reason="leaves"))
        self.end(worker, back_after=back_after, lingers=True, noticed=True)

    def connect(self, worker: Worker) -> None:
        if not self.transport.up:
            self.after(worker, RETRY_SECONDS, partial(self.connect, worker))
            return
        connection = worker.connection = SimConnection(worker, self.transport.incarnation)
        worker.micro_steps = 0
        if worker.losses < self.audit.losses:
            worker.version, worker.losses = 0, self.audit.losses
        self.tell(worker, Hello(speed_hint=self.random.uniform(0.5, 2.0)))
        if worker.answer is not None and self.random.random() < 0.5:
            self.audit.report.counts["answers sent again"] += 1
            self.tell(worker, worker.answer)
        self.beat(worker, connection)

    def reconnect(self, worker: Worker, broken: SimConnection) -> None:
        """Connect again. Half of the time the worker finishes its leases first, which are no longer its own."""
        if worker.connection is broken:
            if self.random.random() < 0.5:
                worker.leases.clear()
            worker.connection = None
            self.connect(worker)

    def beat(self, worker: Worker, connection: SimConnection) -> None:
        if worker.connection is connection:
            self.tell(worker, Progress(micro_steps=worker.micro_steps))
            self.after(worker, HEARTBEAT_SECONDS, partial(self.beat, worker, connection))

    def read(self, connection: SimConnection, message: ToWorker) -> None:
        worker = connection.worker
        if worker.connection is not connection:
            return
        match message:
            case Version():
                if connection.incarnation == self.transport.incarnation:
                    self.audit.demand(version_wrong(worker, message, self.audit.history))
                worker.version = message.version
                worker.theta = theta_of(message)
            case Lease():
                worker.leases.append(message)
                worker.bases[message.lease_id] = worker.theta
                if len(worker.leases) == 1:
                    self.compute(worker, message)
            case Stop():
                pause = self.random.uniform(0.1, 1.0) if message.again else LEFT_OUT_SECONDS
                self.leave(worker, back_after=pause)

    def compute(self, worker: Worker, lease: Lease) -> None:
        base = worker.bases.pop(lease.lease_id)

        def go_on(done: int) -> None:
            if not worker.leases or worker.leases[0] is not lease:
                return
            if len(worker.leases) > 1:  # another lease waits: this one was revoked
                worker.leases.pop(0)
                self.compute(worker, worker.leases[0])
                return
            if done:
                worker.micro_steps += 1
                self.tell(worker, Progress(micro_steps=worker.micro_steps, part=done / len(lease.units)))
            if done < len(lease.units):
                slowness = SLOWNESS if self.clock.now < worker.slow_until else 1.0
                seconds = slowness * self.random.uniform(0.9, 1.1) / worker.rate
                self.after(worker, seconds, partial(go_on, done + 1))
                return
            self.contribute(worker, lease, base=base)
            worker.leases.pop(0)
            if worker.leases:
                self.compute(worker, worker.leases[0])

        go_on(0)

    def contribute(self, worker: Worker, lease: Lease, *, base: int) -> None:
        """Send a contribution. A bad one has a wrong sum, and either says that it is invalid or holds a NaN."""
        bad = worker.bad or self.bad_unit in lease.units or self.random.random() < self.bad_rate
        if bad:
            self.audit.bad_answers.update(lease.units)
            worker.bad_rounds.add(lease.units[0] // (self.audit.steps * self.audit.rules.units_per_step))
        honest = not bad or self.random.random() < 0.5
        total = MASK if bad else gradient(lease.units, base)
        part = SimAnswer(units=lease.units, version=lease.version, base=base, total=total, finite=honest)
        worker.answer = Contribution(
            lease_id=lease.lease_id,
            tokens=UNIT_TOKENS * len(lease.units),
            loss_sum=float(len(lease.units)),
            tensors=part.tensors(),
            valid=not (bad and honest),
        )
        for _ in range(1 if self.random.random() < 0.95 else 2):
            self.tell(worker, worker.answer)


def theta_of(message: Version) -> int:
    assert isinstance(message.parameters, dict)
    return number_of(message.parameters["theta"])


def version_wrong(worker: Worker, message: Version, history: Mapping[int, int]) -> str:
    if message.version < worker.version:
        return f"I4: {worker.name} sees version {message.version} after {worker.version}"
    if history.get(message.version) != theta_of(message):
        return f"I3: {worker.name} is given other weights of version {message.version}"
    return ""
