"""A worker, the program of `cuadrilla join`: it connects, fetches the run and trains until the coordinator says stop.

It dials out, listens on nothing and keeps nothing that cannot be replaced. When the connection breaks, it tries again
with growing pauses and joins anew; its model and its data stay loaded. After a while it also dials the standbys that
the coordinator has named, because one of them may have been promoted.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cuadrilla.config import Config
from cuadrilla.crew.bundle import require_work
from cuadrilla.crew.children import Children, cuadrilla_command
from cuadrilla.crew.equipment import equip_worker
from cuadrilla.crew.node import Node
from cuadrilla.crew.reporting import NewestLines, machine_facts, reporting
from cuadrilla.errors import LinkError
from cuadrilla.link.base import COME_AGAIN, KICKED, LEAVES, Goodbye, Link, Refused, Stop
from cuadrilla.link.client import Connection, GrpcLink
from cuadrilla.link.practice import PracticeLink, Shape
from cuadrilla.link.wire import Layout
from cuadrilla.log import NOTE
from cuadrilla.messages import Message
from cuadrilla.plan.devices import DeviceChoice, Use
from cuadrilla.train.setup import Equipment

if TYPE_CHECKING:
    from cuadrilla.crew.island import Island

T = TypeVar("T")

GIVE_UP_SECONDS = 600.0
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 5.0
LOYAL_SECONDS = 15.0
"""Only after this time the standbys are dialled, too: a coordinator that was killed has been restarted by then."""
POLL_SECONDS = 0.5
NO_SHAPE = Shape()

log = logging.getLogger(__name__)


def run_worker(node: Node, use: Use, *, shape: Shape = NO_SHAPE, island: "Island | None" = None) -> str:
    """Work with one device until the run ends; return why it ended. `island`: the ranks that are this worker together;
    this process is rank 0. Raises LinkError when the coordinator refuses this node or stays away."""
    with NewestLines() as lines:
        worker = _Worker(node, use, shape=shape, lines=lines, island=island)
        reason = serve_sessions(worker.serve, node, device=use.name)
        if island is not None:
            island.end()
        return reason


def serve_sessions(
    serve: Callable[[Connection], Stop], node: Node, *, device: str = "", leaving: threading.Event | None = None
) -> str:
    """Hold one session after another, until the coordinator ends the work or `leaving` is set; return why it ended.

    `serve` holds a session and returns the Stop that ended it. Raises Refused if this node is not wanted any more,
    LinkError, and what `serve` raises.
    """
    patience, leaving = Patience(node), leaving or threading.Event()
    while True:
        if node.idle_policy is not None:
            patience.reached += node.idle_policy.wait_until_idle(unless=leaving)
        if leaving.is_set():
            return LEAVES
        try:
            with closing(node.connect(patience.address, device=device)) as connection:
                stop = serve(connection)
            if stop.refused:
                raise Refused(stop.reason, hint=COME_AGAIN if stop.reason == KICKED else "see the coordinator's log")
            if not stop.again:
                return Message(stop.reason)
            log.log(NOTE, "out of the crew for now: %s", Message(stop.reason))
            patience = Patience(node)
        except Refused:
            raise
        except LinkError as error:
            patience.wait(error)


def in_session(
    connection: Connection, node: Node, *, parameters: Sequence[Layout], work: Callable[[GrpcLink], Stop]
) -> Stop:
    """Call `work` in a new session. Return its Stop, or the one that came before the session broke. Raises LinkError if
    the session breaks without a Stop."""
    session = connection.session(parameters=parameters)
    try:
        return work(session)
    except LinkError:
        if (stop := session.final_stop()) is None:
            raise
        return stop
    except KeyboardInterrupt:
        session.call(Goodbye(reason=LEAVES))
        raise
    finally:
        node.heard_at, node.standbys = session.heard_at, session.standbys or node.standbys
        session.close()


def once(node: Node, ask: Callable[[Connection], T]) -> T:
    """Call `ask` as soon as the coordinator answers; return its result. Raises LinkError, and what `ask` raises."""
    found: list[T] = []

    def serve(connection: Connection) -> Stop:
        found.append(ask(connection))
        return Stop(reason="")

    serve_sessions(serve, node)
    return found[0]


class Patience:
    """How long to keep dialling a coordinator that does not answer, and at which address."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.address, self._dialled = node.crew.address, 0
        self.reached, self._pause = time.monotonic(), FIRST_PAUSE_SECONDS

    def wait(self, error: LinkError) -> None:
        """Sleep before the next try, and choose its address. Raises `error` after GIVE_UP_SECONDS without an answer."""
        if self._node.heard_at > self.reached:
            self.reached, self._pause = self._node.heard_at, FIRST_PAUSE_SECONDS
        if time.monotonic() - self.reached > GIVE_UP_SECONDS:
            raise error
        first = self._pause == FIRST_PAUSE_SECONDS  # one warning for as long as the coordinator is off
        log.log(logging.WARNING if first else logging.DEBUG, "%s; trying again until it answers", error.message)
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
        if time.monotonic() - self.reached > LOYAL_SECONDS:
            self._dialled += 1
            addresses = [self._node.crew.address, *self._node.standbys]
            self.address = addresses[self._dialled % len(addresses)]


class _Worker:
    """A worker that trains. Its model and data are loaded once and kept over sessions."""

    def __init__(self, node: Node, use: Use, *, shape: Shape, lines: NewestLines, island: "Island | None") -> None:
        self._node, self._use, self._shape, self._lines, self._island = node, use, shape, lines, island
        self._equipment: Equipment | None = None

    def serve(self, connection: Connection) -> Stop:
        if self._equipment is None:
            self._equipment = self._equip(*self._node.found_run(connection))
        else:
            require_work(self._node.describe(connection), jobs=False)
            log.log(NOTE, "back at work")
        work = partial(self._train, self._equipment)
        return in_session(connection, self._node, parameters=self._equipment.parameters, work=work)

    def _equip(self, config: Config, folder: Path) -> Equipment:
        use = self._use
        if self._island is not None:
            self._island.share(config, folder)
            equipment = self._island.equip(config, folder, threads=use.threads)
            log.log(NOTE, "one worker of %s", self._island)
            return equipment
        return equip_worker(config, folder, device=use.device, cores=use.threads, speed=self._shape.speed)

    def _train(self, equipment: Equipment, session: GrpcLink) -> Stop:
        practice = PracticeLink(
            session,
            shape=self._shape,
            tell=self._node.report,
            units_per_step=equipment.length.units_per_step,
            counted=equipment.task.defaults.counted,
        )
        link: Link = practice
        if self._island is not None:
            link = self._island.link(inner=link)
        with reporting(
            session.call,
            facts=machine_facts(equipment.device),
            poll=practice.poll,
            round_trip=session.round_trip,
            lines=self._lines,
            policy=self._node.idle_policy,
            leave=session.hold,
        ):
            return equipment.work(link)


def work_on_all(node: Node, choice: DeviceChoice) -> str:
    """Work with these devices of this machine until the run ends; return why it ended. Raises as `run_worker`."""
    for note in choice.notes:
        node.tell(note)
    return _work_apart(node, choice.uses) if len(choice.uses) > 1 else run_worker(node, choice.uses[0])


def _work_apart(node: Node, uses: Sequence[Use]) -> str:
    """Start a process for each device, with the machine's token; each names its device in its calls (`link/base.py`).
    If one dies, the others go on. Raises the error of the last if none ended in order."""
    once(node, node.found_run)  # fetches once what all of them need
    log.log(NOTE, "a worker for each of %s", ", ".join(use.name for use in uses))
    assert node.idle_policy is not None
    children, done = Children(), ""
    try:
        for use in uses:
            command = worker_command(use.name, use, crew=node.crew.folder, rules=asdict(node.idle_policy.rules))
            children.start(use.name, command, environment=use.environment)
        while children.alive:
            time.sleep(POLL_SECONDS)
            for name, ending in children.poll().items():
                if ending.code:
                    log.warning("%s died: %s", name, ending.reason)
                else:
                    done = ending.said.strip()
    finally:
        children.end(finish_seconds=0.0)  # they have nothing to save
    if not done:
        raise children.failure()
    return Message(done)


def worker_command(name: str, use: Use, *, crew: Path, **more: Any) -> list[str]:
    """Command that starts a worker process (`cli/crew.py`, work). `crew`: folder with its token, never an argument."""
    settings = {"crew": str(crew), "device": use.device, "threads": use.threads, **more}
    return cuadrilla_command("--json", "work", name, json.dumps(settings))
