"""Workers in this process: one in the calling thread, or several as threads beside it.

Alone, the worker's model is the coordinator's: no second copy of the weights, no second thread. Several workers each
have a model of their own, a chosen speed, and the in-process link.
"""

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from cuadrilla.crew.equipment import num_cores, set_threads
from cuadrilla.crew.reporting import machine_facts, reporting
from cuadrilla.link.base import Link
from cuadrilla.link.inproc import InProcServer
from cuadrilla.link.practice import PracticeLink, Shape
from cuadrilla.messages import Message
from cuadrilla.sync.statistics import refuse_private_buffers
from cuadrilla.train.coordinate import Outcome
from cuadrilla.train.setup import RunContext, compile_blocks
from cuadrilla.train.thread import CoordinatorThread

log = logging.getLogger(__name__)

WrapLink = Callable[[str, Link], Link]


def run_local(
    context: RunContext,
    *,
    wrap_link: WrapLink | None = None,
    tell: Callable[[str], None] = lambda _: None,
    cores: int = 0,
) -> Outcome:
    """Train to the end, or to the stop that was asked for. Raises whatever made the run fail.

    `wrap_link(worker, link)` puts another link around a worker's own: faults in tests, shaping in practice, an island.
    `tell` hears what was chosen for this machine. `cores` 0: all that this process may use.
    """
    speeds = context.config.engine.workers
    before = torch.get_num_threads()
    set_threads(context.config, cores=max(1, (cores or num_cores()) // len(speeds)))
    if context.kernels.reason:
        tell(Message("kernels    {choice}", choice=context.kernels))
    alone, runtime = len(speeds) == 1, CoordinatorThread(context.coordination)
    server = InProcServer(context.coordination.receive if alone else runtime.deliver)
    try:
        context.coordination.open(server.send)
        if context.coordination.outcome is None and alone:
            model = copy.deepcopy(context.model) if context.strategy.moves_weights else context.model
            _work("worker-1", replace(context, model=model, speed=speeds[0]), server, wrap_link=wrap_link)
        elif context.coordination.outcome is None:
            _work_in_threads(context, runtime, server, wrap_link=wrap_link)
    finally:
        context.store.close()
        torch.set_num_threads(before)
    return context.coordination.result()


def _work_in_threads(
    context: RunContext, runtime: CoordinatorThread, server: InProcServer, *, wrap_link: WrapLink | None
) -> None:
    """The calling thread coordinates."""
    coordination = context.coordination
    refuse_private_buffers(context.model)
    owns = {
        f"worker-{number}": replace(context, model=copy.deepcopy(context.model), speed=speed)
        for number, speed in enumerate(context.config.engine.workers, start=1)
    }
    work = partial(
        _work,
        server=server,
        wrap_link=wrap_link,
        pass_lock=threading.Lock() if draws_random_numbers(context.model) else None,
    )

    def poll() -> None:
        for name in [name for name, worker in working.items() if worker.done()]:
            error = working.pop(name).exception()
            if error is None:
                continue
            if coordination.failure is None:
                log.warning("%s died: %s: %s", name, type(error).__name__, error)
                log.info("how %s died:", name, exc_info=error)
            if working:
                coordination.left(name, f"{type(error).__name__}: {error}")
            else:  # the death of the last one is the run's
                coordination.fail(error)

    with ThreadPoolExecutor(len(owns)) as pool:
        working = {name: pool.submit(work, name, own) for name, own in owns.items()}
        runtime.serve(poll, ticks=False)


def _work(
    name: str,
    context: RunContext,
    server: InProcServer,
    *,
    wrap_link: WrapLink | None,
    pass_lock: AbstractContextManager[object] | None = None,
) -> None:
    """One worker with the model and the speed of `context`."""
    practice = PracticeLink(server.connect(name), shape=Shape(speed=context.speed))
    link: Link = practice if wrap_link is None else wrap_link(name, practice)
    if context.config.train.compile:
        compile_blocks(context.model)
    report = partial(context.coordination.reported, name)
    try:
        with reporting(report, facts=machine_facts(context.device), link=practice, folder=context.store.run.path):
            context.work(link, pass_lock=pass_lock)
    finally:
        link.close()


def draws_random_numbers(model: nn.Module) -> bool:
    """True for models with dropout: their passes take turns, because torch's generator is one for the process."""
    return any(getattr(module, "p", 0.0) for module in model.modules() if "Dropout" in type(module).__name__) or bool(
        getattr(getattr(model, "config", None), "dropout", 0.0)
    )
