"""A run that some machines of a crew train together, while the others do something else: the crew is open already.

This process coordinates it, in a thread of its own. Its machines take part as in any crew, over the same port, and are
taken back when it ends. When none of them has been there for `ABANDONED_SECONDS`, it saves and stops.
"""

import time
from functools import partial

import torch

from cuadrilla.config import CrewEngine
from cuadrilla.engines.bundle import offer
from cuadrilla.engines.crew import Lending, OwnWorkers, let_in
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.served import Served
from cuadrilla.link.wire import Layout
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, private_folder
from cuadrilla.train.coordinate import CoordinatorRuntime, Outcome
from cuadrilla.train.setup import RunContext
from cuadrilla.train.thread import CoordinatorThread

ABANDONED_SECONDS = 60.0


def run_lent(context: RunContext, run: RunDir, *, lending: Lending) -> Outcome:
    """Train to the end, or to the stop that was asked for. Raises whatever made the run fail."""
    engine, server = context.config.engine, lending.server
    assert isinstance(engine, CrewEngine)
    before = torch.get_num_threads()
    if context.config.sync.strict:
        torch.set_num_threads(context.config.train.threads or 1)
    runtime = CoordinatorThread(context.coordination)
    served = Served(
        receiver=runtime,
        offer=offer(context.config, run.path),
        parameters=Layout.of(context.strategy.version_like(context.model)),
        contribution=Layout.of(context.strategy.contribution_like(context.model)),
        name=lending.name,
    )
    children = OwnWorkers(engine=engine, run=run, event=context.store.event)
    context.coordination.open(partial(server.send, of=served))  # before anybody can come in
    try:
        with private_folder() as private:
            for worker in lending.own:
                let_in(worker.name, private / worker.name, keys=lending.keys, nodes=lending.listed)
            server.lend([*lending.nodes, *(worker.name for worker in lending.own)], served)
            for worker in lending.own:
                identity = private / worker.name
                children.start_worker(worker, address=server.direct_address, identity=identity)
            return runtime.serve(_Watch(served, server, children=children, coordination=context.coordination).look)
    finally:
        server.take_back(served)
        children.end()
        context.store.close()
        torch.set_num_threads(before)


class _Watch:
    """Notices who has died, and that nobody is left."""

    def __init__(
        self, served: Served, server: CrewServer, *, children: OwnWorkers, coordination: CoordinatorRuntime
    ) -> None:
        self._served, self._server, self._children, self._coordination = served, server, children, coordination
        self._seen_at = time.monotonic()

    def look(self) -> None:
        self._children.look()
        now = time.monotonic()
        if self._server.present(self._served):
            self._seen_at = now
        elif now - self._seen_at > ABANDONED_SECONDS:
            told = "none of its machines has been there for {seconds:g} s"
            self._coordination.request_stop(Message(told, seconds=ABANDONED_SECONDS))
