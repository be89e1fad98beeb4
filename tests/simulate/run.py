"""A crew under a virtual clock: one coordinator, a few workers, a lossy network and a disk that crashes.

`simulate(seed)` runs the product's state machine and I/O shell (`sync/coordinator.py` with a strategy's rounds,
`train/runtime.py`) from the first round to the last, through random faults. It raises `Violation` at the first event
after which an invariant does not hold; `disk.py` lists the invariants I1-I7. All random numbers come from the seed, and
time comes from a heap of events, without threads, wall clock or sleep. So a seed that fails once fails always.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from cuadrilla.config import GuardSection
from cuadrilla.errors import ResourceError
from cuadrilla.link.base import Contribution, Goodbye, Hello, Lease, Progress, Stop, ToCoordinator, ToWorker, Version
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.kinds import Strategy, exact
from cuadrilla.sync.membership import HUNG_AFTER_SECONDS, Rules
from cuadrilla.sync.merge import Merger
from cuadrilla.train.guard import Guard, Verdict
from cuadrilla.train.runtime import CoordinatorRuntime
from cuadrilla.train.store import Store
from tests.simulate.crew import Clock, SimConnection, SimCrew, Worker
from tests.simulate.disk import (
    RULES,
    Audit,
    Crash,
    Disk,
    SimFault,
    SimReport,
    SimWeights,
    VirtualStore,
    recover,
    undisturbed,
)
from tests.simulate.disk import Violation as Violation

TICK_SECONDS = 0.5
FAULTS_UNTIL_SECONDS = 40.0
GRACE_SECONDS = 60.0
"""The longest wait for a commit once no fault lasts: eight units of 2 s, and again one by one."""
FOREVER = 1e6
EXACT = exact()

WORKER_FAULTS = (
    *("kill", "power off", "freeze", "slow", "hang", "leave"),
    *("cut", "up blocked", "down blocked", "isolated"),
)
COORDINATOR_FAULTS = ("coordinator", "coordinator and rot", "disk full")


def draw_faults(rng: random.Random, workers: Sequence[str]) -> list[SimFault]:
    """Draw up to twelve faults. All of them end, but one worker may stay dead besides."""
    faults = []
    for _ in range(rng.randint(0, 12)):
        of_worker = rng.random() < 0.75
        faults.append(
            SimFault(
                at=rng.uniform(0.0, FAULTS_UNTIL_SECONDS),
                kind=rng.choice(WORKER_FAULTS if of_worker else COORDINATOR_FAULTS),
                worker=rng.choice(workers) if of_worker else "",
                seconds=rng.uniform(0.5, 20.0) if of_worker else rng.uniform(1.0, 5.0),
                steps=rng.choice((0, rng.randint(0, 12), rng.randint(0, 60))),
            )
        )
    if rng.random() < 0.2:
        at, kind = rng.uniform(0.0, FAULTS_UNTIL_SECONDS), rng.choice(("kill", "power off"))
        faults.append(SimFault(at=at, kind=kind, worker=workers[-1], seconds=FOREVER))
    return sorted(faults, key=lambda fault: fault.at)


class NeverGivesUp(Guard):
    """Never aborts the run: the faults may leave more rounds without a usable contribution than a run allows."""

    def judge(self, *, loss: float, norm: float) -> Verdict:
        verdict = super().judge(loss=loss, norm=norm)
        return verdict if verdict is Verdict.OK else Verdict.SKIP


class World:
    """One run: the coordinator's process with its transport, disk and parent, the crew, and the faults."""

    def __init__(
        self, seed: int, faults: Sequence[SimFault] | None, *, strategy: Strategy = EXACT, rules: Rules = RULES
    ) -> None:
        self.random = random.Random(seed)
        self.report = SimReport(seed=seed, faults=())
        self.clock = Clock()
        self.disk = Disk()
        self.strategy = strategy
        self.rules = rules
        steps = strategy.rounds().steps
        self.audit = Audit(report=self.report, disk=self.disk, clock=lambda: self.clock.now, rules=rules, steps=steps)
        self.crew = SimCrew(self.random, clock=self.clock, audit=self.audit, transport=self)
        drawn = draw_faults(self.random, list(self.crew.workers))
        self.report.faults = tuple(drawn if faults is None else faults)
        self.up = False
        self.incarnation = 0
        self.sessions: dict[str, SimConnection] = {}
        self.calm_from = 0.0
        self.full_until = 0.0
        self.rot = False
        self.steps_to_crash: int | None = None
        self.restart_seconds = 2.0

    def run(self) -> SimReport:
        for fault in self.report.faults:
            self.clock.after(fault.at, partial(self.strike, fault))
        self.crew.start()
        self.start()
        while not (self.up and self.coordination.outcome):
            self.guarded(self.clock.next())
            for invariant in INVARIANTS:
                self.audit.demand(invariant(self) if self.up else "")
        self.report.theta, self.report.seconds = self.weights.theta, self.clock.now
        self.report.skipped = {unit for units in self.audit.skips.values() for unit in units}
        if self.audit.counted != set(range(self.rules.units_per_step * self.rules.num_steps)):
            self.audit.demand(f"I1: at the end only the units {sorted(self.audit.counted)} are counted")
        if not self.report.skipped and self.weights.theta != undisturbed(self.rules, steps=self.audit.steps):
            self.audit.demand("I3: nothing was skipped, and the last weights are not those of the undisturbed run")
        return self.report

    def guarded(self, call: Callable[[], None]) -> None:
        """Make a call in the coordinator's process. A crash or a full disk ends that process and nothing else."""
        try:
            call()
            if self.coordination.failure is not None:
                raise self.coordination.failure
        except Crash:
            self.die()
        except ResourceError:
            self.report.counts["coordinator stopped by a full disk"] += 1
            self.die()

    # -- the coordinator's process -------------------------------------------------------------------------------------

    def point(self) -> None:
        """Called between two actions: the coordinator's process may die here, and does nothing more then."""
        if self.steps_to_crash is not None:
            self.steps_to_crash -= 1
            self.up = self.steps_to_crash >= 0
        if not self.up:
            raise Crash

    def start(self) -> None:
        if self.rot and len(self.disk.checkpoints) > 1:
            self.disk.lose_newest_checkpoint()
            self.report.counts["damaged checkpoints"] += 1
        self.rot, self.up, self.sessions = False, True, {}
        self.incarnation += 1
        self.audit.restarted()
        state, guard_state, theta, after = recover(self.disk)
        self.coordinator = Coordinator(rules=self.rules, rounds=self.strategy.rounds(), state=state)
        self.coordinator.work.next_lease_id = 1 + (self.incarnation << 32)
        guard = NeverGivesUp(section=GuardSection())
        if guard_state is not None:
            guard.load_state(guard_state)
        self.weights = SimWeights(self.point, theta)
        saved = self.disk.checkpoints[-1][0] if self.disk.checkpoints else -1
        store = VirtualStore(self.point, self.disk, self.weights, self.audit, saved, after)
        self.coordination = CoordinatorRuntime(
            coordinator=self.coordinator,
            merge=cast(Merger, self.weights),
            guard=guard,
            store=cast(Store, store),
            sinks=(),
            clock=lambda: self.clock.now,
        )
        self.clock.after(TICK_SECONDS, partial(self.tick, self.incarnation))
        self.guarded(partial(store.remove_records, lambda version: version > state["version"]))
        if self.up:
            self.guarded(partial(self.coordination.open, self.send))

    def die(self) -> None:
        """End the coordinator's process. Its connections break, and its parent starts it again."""
        self.up = False
        self.coordination.failure = None
        self.steps_to_crash = None
        self.calm_from = max(self.calm_from, self.clock.now + self.restart_seconds)
        for worker in self.crew.workers.values():
            if worker.connection is not None:
                self.crew.cut(worker.connection, noticed_after=self.random.uniform(0.0, 1.0))
        self.clock.after(self.restart_seconds, self.start)

    def tick(self, incarnation: int) -> None:
        if self.up and incarnation == self.incarnation:
            self.clock.after(TICK_SECONDS, partial(self.tick, incarnation))
            self.coordination.tick()

    # -- its transport: what link/server.py promises ------------------------------------------------------

    def hear(self, connection: SimConnection, message: ToCoordinator) -> None:
        """Deliver a message to the coordinator if it is of the worker's newest connection; drop it otherwise."""
        worker = connection.worker
        if not self.up or connection.incarnation != self.incarnation:
            return
        if isinstance(message, Hello):
            older = self.sessions.get(worker.name)
            self.sessions[worker.name] = connection
            if older is not None:
                self.coordination.deliver(worker.name, Goodbye(reason="a newer session of the same node has begun"))
                self.coordination.work_off()
        elif self.sessions.get(worker.name) is not connection:
            self.report.counts["late messages of an old connection"] += 1
            return
        worker.heard_at = self.clock.now
        if isinstance(message, Progress):
            if message.micro_steps > connection.micro_steps:
                connection.micro_steps, worker.worked_at, worker.owes = message.micro_steps, self.clock.now, False
            self.coordination.deliver(worker.name, message)
        else:
            held = self.coordinator.work.leases.get(worker.name)
            answers = isinstance(message, Contribution) and held is not None and held.lease_id == message.lease_id
            worker.owes = worker.owes and not answers and not isinstance(message, Hello)
            self.coordination.deliver(worker.name, message)
            self.coordination.work_off()

    def close(self, connection: SimConnection) -> None:
        name = connection.worker.name
        if self.up and connection.incarnation == self.incarnation and self.sessions.get(name) is connection:
            del self.sessions[name]
            self.coordination.deliver(name, Goodbye(reason="connection lost"))
            self.coordination.work_off()

    def send(self, name: str, message: ToWorker) -> None:
        if not self.up:
            return  # the process has died; its shell still sends a Stop to all
        self.point()
        worker, connection = self.crew.workers[name], self.sessions.get(name)
        if isinstance(message, Version):
            self.audit.announce(message.version, self.weights.theta)
        elif isinstance(message, Lease):
            worker.worked_at = worker.worked_at if worker.owes else self.clock.now
            worker.owes = True
        elif isinstance(message, Stop):
            self.report.counts[message.reason.split(":")[0]] += 1
            self.audit.demand(evicted_wrongly(worker, connection, message.reason, now=self.clock.now))
        if connection is not None:
            connection.stopped |= isinstance(message, Stop)
            self.crew.send(connection, message)

    # -- faults --------------------------------------------------------------------------------------------------------

    def strike(self, fault: SimFault) -> None:
        self.calm_from = max(self.calm_from, self.clock.now + (fault.seconds if fault.seconds < FOREVER else 0.0))
        if fault.worker:
            worker = self.crew.workers[fault.worker]
            if not worker.away:
                self.strike_worker(worker, fault)
        elif fault.kind == "disk full":
            self.full_until = max(self.full_until, self.clock.now + fault.seconds)
            self.disk.full = True
            self.clock.after(fault.seconds, self.free_disk)
        elif self.up:
            self.rot = fault.kind == "coordinator and rot"
            self.restart_seconds, self.steps_to_crash = fault.seconds, fault.steps
            if fault.steps == 0:
                self.die()

    def free_disk(self) -> None:
        self.disk.full = self.clock.now < self.full_until

    def strike_worker(self, worker: Worker, fault: SimFault) -> None:
        self.report.counts[fault.kind] += 1
        lingers = self.random.random() < 0.5
        match fault.kind:
            case "kill" | "power off":
                self.crew.end(worker, back_after=fault.seconds, lingers=lingers, noticed=fault.kind == "kill")
            case "freeze":
                worker.frozen_until = max(worker.frozen_until, self.clock.now + fault.seconds)
            case "slow":
                worker.slow_until = self.clock.now + fault.seconds
            case "hang":  # it reports and never answers; a first pass gets more time
                worker.leases = [] if worker.micro_steps else worker.leases
            case "leave":
                self.crew.leave(worker, back_after=fault.seconds)
            case _ if worker.connection is not None:
                self.disturb(worker.connection, fault, lingers=lingers)

    def disturb(self, connection: SimConnection, fault: SimFault, *, lingers: bool) -> None:
        """Cut a connection, or block it in one or both directions. Workers give up half of the blocked ones."""
        connection.lingers = lingers
        for direction, kinds in (("up", ("up blocked", "isolated")), ("down", ("down blocked", "isolated"))):
            if fault.kind in kinds:
                connection.blocked[direction] = self.clock.now + fault.seconds
        if fault.kind == "cut":
            noticed = self.random.random() < 0.7
            self.crew.cut(connection, noticed_after=self.random.uniform(0.0, 3.0), noticed=noticed)
        elif self.random.random() < 0.5:
            give_up = partial(self.crew.cut, connection, noticed_after=0.0, noticed=False)
            self.clock.after(self.random.uniform(0.0, fault.seconds), give_up)


# -- invariants: each function returns a sentence if it is violated, else "" -------------------------------------------


def units_are_in_one_place(world: World) -> str:
    coordinator = world.coordinator
    work = coordinator.work
    places = [*itertools.chain(*work.free), *work.skipped]
    for answer in work.answers.values():
        places += answer.grant.units
    places += {unit for lease in work.leases.values() for unit in lease.units}  # a late lease has a second one
    open_units = set(range(work.units.stop)) - world.audit.counted
    if coordinator.finished or sorted(places) == sorted(open_units):
        return ""
    return f"I1: of the units {sorted(open_units)} these are somewhere: {sorted(places)}"


def rounds_are_opened_in_time(world: World) -> str:
    """One round is open at a time, and never more units than the run has."""
    coordinator = world.coordinator
    size, version, opened = world.rules.units_per_step, coordinator.version, coordinator.work.units.stop
    most = min(world.rules.num_steps, version + world.audit.steps)
    if coordinator.finished or version * size < opened <= most * size:
        return ""
    return f"I6: at version {version} units up to {opened} are open"


def leases_have_a_member_each(world: World) -> str:
    members, work = world.coordinator.crew.members, world.coordinator.work
    if not members.keys() >= work.leases.keys():
        return f"I1: leases are held by {list(work.leases)}, members are {list(members)}"
    return ""


def units_do_not_wait(world: World) -> str:
    coordinator = world.coordinator
    if coordinator.crew.members and not coordinator.work.leases and not coordinator.finished:
        return "I5: units are free, members are idle, and nothing is leased"
    return ""


def versions_come(world: World) -> str:
    waited = world.clock.now - max(world.calm_from, world.audit.last_commit)
    return f"I5: no commit for {waited:.0f} s without any fault" if waited > GRACE_SECONDS else ""


INVARIANTS: tuple[Callable[[World], str], ...] = (
    units_are_in_one_place,
    rounds_are_opened_in_time,
    leases_have_a_member_each,
    units_do_not_wait,
    versions_come,
)


def evicted_wrongly(worker: Worker, connection: SimConnection | None, reason: str, *, now: float) -> str:
    silent, busy = now - worker.heard_at, now - worker.worked_at
    if reason.startswith("lost") and silent < (RULES.lost_after_seconds or 0.0):
        return f"I5: {worker.name} is called lost {silent:.1f} s after it was heard"
    if reason.startswith("hung") and busy < HUNG_AFTER_SECONDS:
        return f"I5: {worker.name} is called hung {busy:.1f} s after it was given work or did some"
    if "unusable" in reason and len(worker.bad_rounds) < 2:
        return f"I5: {worker.name} is sent away for contributions that were good"
    if "not a member" in reason and connection is not None and not connection.stopped:
        return f"I5: {worker.name} is no member any more, and nobody has sent it away"
    return ""


def simulate(
    seed: int, faults: Sequence[SimFault] | None = None, *, strategy: Strategy = EXACT, rules: Rules = RULES
) -> SimReport:
    """Run one crew to the end of its run. Raises Violation.

    `faults` replaces the faults drawn from the seed; crew and network stay the same. `strategy`: gives the rounds; its
    merge half is replaced by `SimWeights`, over one integer.
    """
    return World(seed, faults, strategy=strategy, rules=rules).run()
