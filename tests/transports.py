"""Transports to the coordinator for the shared battery: the same run, the same workers, another link between them."""

import copy
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import torch

from cuadrilla.crew.local import WrapLink, draws_random_numbers, run_local
from cuadrilla.errors import CuadrillaError
from cuadrilla.link.base import Link
from cuadrilla.link.client import Connection
from cuadrilla.link.practice import PracticeLink, Shape
from cuadrilla.link.server import CrewServer
from cuadrilla.link.wire import Layout
from cuadrilla.train.coordinate import Outcome
from cuadrilla.train.setup import RunContext
from cuadrilla.train.thread import CoordinatorThread
from tests.faults import Died

IN_THREADS = ("inproc", "grpc")
"""Workers are threads of this process."""
TICK_SECONDS = 0.02


def run_through(transport: str, context: RunContext, *, wrap_link: WrapLink | None = None) -> Outcome:
    """`transport`: one of IN_THREADS."""
    return (
        run_local(context, wrap_link=wrap_link)
        if transport == "inproc"
        else run_over_grpc(context, wrap_link=wrap_link)
    )


def run_over_grpc(context: RunContext, *, wrap_link: WrapLink | None = None) -> Outcome:
    """Workers as threads with a model of their own; everything they say goes through TLS on the loopback."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        crew = _Crew(context, Path(folder), wrap_link=wrap_link)
        try:
            return crew.run()
        finally:
            crew.server.close()
            for thread in crew.threads:
                thread.join()
            context.store.close()
            torch.set_num_threads(before)


class _Crew:
    def __init__(self, context: RunContext, folder: Path, *, wrap_link: WrapLink | None) -> None:
        self.context = context
        self.folder = folder
        self.wrap_link = wrap_link
        self.params = context.strategy.version_like(context.model, context.recipe)
        self.runtime = CoordinatorThread(context.coordination)
        self.server = CrewServer(
            folder / "crew",
            receiver=self.runtime,
            parameters=Layout.of(self.params),
            contribution=Layout.of(context.strategy.contribution_like(context.model, context.recipe)),
        )
        self.pass_lock = threading.Lock() if draws_random_numbers(context.model) else None
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def run(self) -> Outcome:
        port = self.server.serve("127.0.0.1:0")
        self.context.coordination.open(self.server.send)
        for index, speed in enumerate(self.context.config.engine.workers, start=1):
            self.threads.append(threading.Thread(target=self.work, args=(f"worker-{index}", speed, port)))
        for thread in self.threads:
            thread.start()
        coordination = self.context.coordination

        def poll() -> None:
            if not any(thread.is_alive() for thread in self.threads) and coordination.outcome is None:
                coordination.fail(self.errors[-1])

        return self.runtime.serve(poll, every_seconds=TICK_SECONDS)

    def work(self, name: str, speed: float, port: int) -> None:
        own = replace(self.context, model=copy.deepcopy(self.context.model), speed=speed)
        identity = self.server.admit(name)
        connection = Connection(f"127.0.0.1:{port}", identity=identity)
        session = connection.session(parameters=own.parameters)
        link: Link = PracticeLink(session, shape=Shape(speed=speed))
        if self.wrap_link is not None:
            link = self.wrap_link(name, link)
        try:
            own.work(link, pass_lock=self.pass_lock)
        except (Died, CuadrillaError, RuntimeError) as error:
            self.errors.append(error)
        finally:
            link.close()
            connection.close()
