"""Runs in this process. One worker is in the coordinator's thread; several have their own threads and the crew link."""

import copy
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cuadrilla.crew.local import WORKER, run_local
from cuadrilla.home import Home
from cuadrilla.link.base import Link, TensorRef, Tensors, ToCoordinator, ToWorker
from cuadrilla.link.client import Connection, GrpcLink
from cuadrilla.link.practice import PracticeLink, Shape
from cuadrilla.link.server import CrewServer
from cuadrilla.link.wire import Layout
from cuadrilla.sync.statistics import refuse_private_buffers
from cuadrilla.train.runtime import Outcome
from cuadrilla.train.setup import RunContext

WrapLink = Callable[[str, Link], Link]
Connect = Callable[[str], GrpcLink]
TICK_SECONDS = 0.02


def run_through(context: RunContext, *, wrap_link: WrapLink | None = None) -> Outcome:
    """Run to the end. `wrap_link`: wraps the link of a worker, whose name it gets, for example to cause faults."""
    wrap = wrap_link or (lambda _worker, link: link)
    if len(context.config.engine.workers) == 1:
        return run_local(context, wrap_link=partial(wrap, WORKER))
    before, threads = torch.get_num_threads(), list[threading.Thread]()
    torch.set_num_threads(1)
    try:
        with serving(context) as connect:
            return _run_threads(context, connect, wrap, threads)
    finally:
        for thread in threads:  # after the server has ended their sessions
            thread.join()
        context.store.close()
        torch.set_num_threads(before)


@contextmanager
def serving(context: RunContext) -> Iterator[Connect]:
    """Serve a run over TLS on the loopback. The result connects a worker by its name."""
    with tempfile.TemporaryDirectory() as folder:
        forms = context.strategy.forms(context.model, context.recipe)
        server = CrewServer(
            Home(Path(folder)),
            receive=context.coordination.deliver,
            contributions=[Layout.of(each) for form in forms for each in form.contributions],
        )
        with closing(server):
            address = f"127.0.0.1:{server.serve('127.0.0.1:0')}"
            context.coordination.open(server.send)
            yield lambda name: Connection(address, identity=server.admit(name)).session(parameters=context.parameters)


def _run_threads(context: RunContext, connect: Connect, wrap: WrapLink, threads: list[threading.Thread]) -> Outcome:
    """Coordinate in the calling thread, with a thread for each worker, which is added to `threads`."""
    errors: list[BaseException] = []
    turns = threading.Lock()

    def work(name: str, speed: float, session: GrpcLink) -> None:
        own = replace(context, model=copy.deepcopy(context.model), speed=speed)
        refuse_private_buffers(own.model)
        link = TakesTurns(PracticeLink(wrap(name, session), shape=Shape(speed=speed)), turns)
        try:
            own.work(link)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # tests let it raise anything
            errors.append(error)
        finally:
            link.end_turn()
            session.close()

    for number, speed in enumerate(context.config.engine.workers, start=1):
        name = f"worker-{number}"
        threads.append(threading.Thread(target=work, args=(name, speed, connect(name))))
        threads[-1].start()

    def poll() -> None:
        if not any(thread.is_alive() for thread in threads) and context.coordination.outcome is None:
            context.coordination.fail(errors[-1])

    return context.coordination.serve(poll, every_seconds=TICK_SECONDS)


class TakesTurns:
    """A link that lets only one thread compute at a time. Random numbers depend on the unit, but torch has a single
    generator for all threads."""

    def __init__(self, link: Link, turns: threading.Lock) -> None:
        self._link, self._turns, self._has_turn = link, turns, False

    def interrupted(self) -> bool:
        """The loop calls it before a pass: wait for the turn."""
        interrupted = self._link.interrupted()
        if not interrupted and not self._has_turn:
            self._has_turn = self._turns.acquire()
        return interrupted

    def call(self, message: ToCoordinator) -> None:
        """The loop calls it after a pass: end the turn."""
        self.end_turn()
        self._link.call(message)

    def next_event(self) -> ToWorker:
        self.end_turn()
        return self._link.next_event()

    def download(self, ref: TensorRef) -> Tensors:
        return self._link.download(ref)

    def end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turns.release()
