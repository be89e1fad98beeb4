"""A run that some machines of a crew train together, while the others do something else: the crew is open already.

This process coordinates it, in a thread of its own. Its machines take part as in any crew, over the same port, and are
taken back when it ends. When none of them has been there for `ABANDONED_SECONDS`, it saves and stops; when none has
come in `COMING_SECONDS`, it fails.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cuadrilla.config import CrewEngine
from cuadrilla.engines.bundle import offer
from cuadrilla.engines.crew import Lending, OwnWorkers, coordinating, let_in
from cuadrilla.engines.node import MAX_RESTARTS
from cuadrilla.errors import LinkError
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.served import Served
from cuadrilla.link.wire import Layout
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir
from cuadrilla.train.coordinate import CoordinatorRuntime, Outcome
from cuadrilla.train.setup import RunContext
from cuadrilla.train.thread import CoordinatorThread

ABANDONED_SECONDS = 60.0
COMING_SECONDS = 600.0
"""They may have much to fetch."""

log = logging.getLogger(__name__)


def run_lent(context: RunContext, run: RunDir, *, lending: Lending) -> Outcome:
    """Train to the end, or to the stop that was asked for. Raises whatever made the run fail."""
    server = lending.lender.server
    runtime = CoordinatorThread(context.coordination)
    with coordinating(context, run) as private:
        served = Served(
            receiver=runtime,
            offer=offer(context.config, run.path),
            parameters=Layout.of(context.strategy.version_like(context.model)),
            contribution=Layout.of(context.strategy.contribution_like(context.model)),
            name=lending.name,
        )
        context.coordination.open(partial(server.send, of=served))  # before anybody can come in
        with _own_workers(context, run, lending, private=private) as own:
            server.lend([*lending.nodes, *(worker.name for worker in lending.own)], served)
            try:
                own.start()
                return runtime.serve(_Watch(served, server, own=own, coordination=context.coordination).look)
            finally:
                server.take_back(served)  # before anything that takes time: they ask at once what is next


class _Own:
    """Worker processes of this machine; one that is killed is started again."""

    def __init__(self, children: OwnWorkers, lending: Lending, *, private: Path) -> None:
        self._children, self._lending, self._private = children, lending, private
        self._workers = {worker.name: worker for worker in lending.own}
        self._deaths: Counter[str] = Counter()

    def start(self) -> None:
        for name in self._workers:
            self._start(name)

    def look(self) -> None:
        for name, code in self._children.look().items():
            self._deaths[name] += code < 0
            if code < 0 and self._deaths[name] <= MAX_RESTARTS:
                log.warning("%s is being restarted", name)
                self._start(name)

    def _start(self, name: str) -> None:
        address = self._lending.lender.server.direct_address
        self._children.start_worker(self._workers[name], address=address, identity=self._private / name)


@contextmanager
def _own_workers(context: RunContext, run: RunDir, lending: Lending, *, private: Path) -> Iterator[_Own]:
    """With keys; they end behind the block."""
    engine, lender = context.config.engine, lending.lender
    assert isinstance(engine, CrewEngine)
    children = OwnWorkers(engine=engine, run=run, event=context.store.event)
    for worker in lending.own:
        let_in(worker.name, private / worker.name, keys=lender.keys, nodes=lender.listed)
    try:
        yield _Own(children, lending, private=private)
    finally:
        children.end()


class _Watch:
    """Notices who has died, and that nobody is there."""

    def __init__(self, served: Served, server: CrewServer, *, own: _Own, coordination: CoordinatorRuntime) -> None:
        self._served, self._server, self._own, self._coordination = served, server, own, coordination
        self._began = time.monotonic()
        self._seen_at: float | None = None

    def look(self) -> None:
        self._own.look()
        now = time.monotonic()
        if self._server.present(self._served):
            self._seen_at = now
        elif self._seen_at is not None and now - self._seen_at > ABANDONED_SECONDS:
            told = "none of its machines has been there for {seconds:g} s"
            self._coordination.request_stop(Message(told, seconds=ABANDONED_SECONDS))
        elif self._seen_at is None and now - self._began > COMING_SECONDS:
            problem = "none of its machines has come within {minutes:g} minutes"
            self._coordination.fail(LinkError(problem, minutes=COMING_SECONDS / 60, hint="their screens say why"))
