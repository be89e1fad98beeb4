"""One worker in the calling thread: its model is the coordinator's, without a second copy of the weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from cuadrilla.crew.equipment import num_cores, set_threads
from cuadrilla.crew.reporting import machine_facts, reporting
from cuadrilla.link.base import Link
from cuadrilla.link.inproc import InProcLink
from cuadrilla.link.practice import PracticeLink
from cuadrilla.train.runtime import Outcome
from cuadrilla.train.setup import RunContext, compile_blocks

WORKER = "worker-1"


def run_local(
    context: RunContext,
    *,
    wrap_link: Callable[[Link], Link] = lambda link: link,
    cores: int = 0,
) -> Outcome:
    """Train to the end, or until it is asked to stop. Raises what made the run fail.

    `wrap_link` puts another link around the worker's own. `cores` 0: all that this process may use.
    """
    coordination, before = context.coordination, torch.get_num_threads()
    set_threads(context.config, cores=cores or num_cores())
    end, report = InProcLink(partial(coordination.receive, WORKER)), partial(coordination.deliver, WORKER)
    practice, folder, facts = PracticeLink(end), context.store.run.path, machine_facts(context.device)
    try:
        coordination.open(lambda _worker, message: end.inbox.put(message))
        if coordination.outcome is None:
            worker = replace(context, model=context.strategy.workers_model(context.model))
            if worker.config.train.compile:
                compile_blocks(worker.model)
            with reporting(report, facts=facts, poll=practice.poll, folder=folder):
                worker.work(wrap_link(practice))
    finally:
        context.store.close()
        torch.set_num_threads(before)
    return coordination.result()
