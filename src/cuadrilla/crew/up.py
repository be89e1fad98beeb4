"""The crew engine: this process coordinates; workers are processes that dial in, here or on other machines.

This machine's workers are child processes. They get tokens of their own in a private temporary folder, and end with
this process: their standard input is a pipe from here. A child's death is noticed at once by its connection, and the
others go on. Without any worker the coordinator waits; but where no other machine can join, the run fails.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cuadrilla.config import Config, CrewEngine
from cuadrilla.crew.bundle import offer
from cuadrilla.crew.children import Children
from cuadrilla.crew.equipment import choose_uses, set_threads
from cuadrilla.crew.reporting import NewestLines, machine_facts, reporting
from cuadrilla.crew.worker import worker_command
from cuadrilla.home import Home
from cuadrilla.link.address import Address
from cuadrilla.link.base import COORDINATOR
from cuadrilla.link.identity import save_node
from cuadrilla.link.server import NOTHING, CrewServer
from cuadrilla.link.wire import Layout
from cuadrilla.log import NOTE
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import RunDir, storage_errors
from cuadrilla.train.runtime import Outcome
from cuadrilla.train.setup import RunContext

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How to open a crew. `home` holds the keys of this machine's crew; without it the keys last as long as the run, as
    in practice. `opened` is called once workers can dial in, with the process of each that was started here.
    `standbys`: nodes that may copy the keys and the run.
    """

    home: Home | None = None
    opened: Callable[[CrewServer, Mapping[str, int]], None] | None = None
    standbys: frozenset[str] = frozenset()


def run_crew(context: RunContext, run: RunDir, *, opening: Opening) -> Outcome:
    """Train with a crew to the end, or until it is asked to stop. Raises what made the run fail."""
    engine = context.config.engine
    assert isinstance(engine, CrewEngine)
    send = partial(context.coordination.deliver, COORDINATOR)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(context.store.close)
        set_threads(context.config, cores=torch.get_num_threads())
        private, lines = Path(stack.enter_context(TemporaryDirectory())), stack.enter_context(NewestLines())
        stack.enter_context(reporting(send, facts=machine_facts(), folder=run.path, lines=lines))
        children = Children()
        stack.callback(children.end)
        home, alone = opening.home or Home(private), opening.home is None
        forms = context.strategy.forms(context.model, context.recipe)
        server = CrewServer(
            home,
            receive=context.coordination.deliver,
            offer=NOTHING if alone else offer(context.config, run.path),
            contributions=[Layout.of(each) for form in forms for each in form.contributions],
            standbys=opening.standbys,
            run=run.path,
        )
        crew = stack.enter_context(closing(server))
        context.coordination.open(crew.send)  # before a worker can connect
        crew.open(Address.parse(engine.listen))
        _start_workers(children, context.config, run, crew, private=private, alone=alone)
        if opening.opened is not None:
            opening.opened(crew, {name: child.pid for name, child in children.alive.items()})
        return context.coordination.serve(partial(_poll, context, crew, children, alone=alone))


def _poll(context: RunContext, crew: CrewServer, children: Children, *, alone: bool) -> None:
    """Without a worker of this machine the run fails, unless others may join; then it is said once."""
    crew.end_kicked()
    ended = children.poll()
    for name, ending in ended.items():
        if ending.code and name in crew.nodes.nodes():  # one that was kicked has not died
            log.warning("%s died: %s", name, ending.reason)
            context.store.event("died", worker=name, reason=ending.reason)
    if children.alive:
        return
    if alone:
        context.coordination.fail(children.failure())
    elif ended:
        log.warning("no worker of this machine is left (%s): others can join", children.failure().message)


def _start_workers(
    children: Children, config: Config, run: RunDir, crew: CrewServer, *, private: Path, alone: bool
) -> None:
    """Start this machine's workers: one for each usable device, in practice one for each speed. Raises DeviceError."""
    engine = config.engine
    assert isinstance(engine, CrewEngine)
    if not alone and engine.workers == [1.0]:
        choice = choose_uses(engine.devices, config=config)
        for note in choice.notes:
            log.log(NOTE, "%s", note)
        workers = [(1.0, use) for use in choice.uses]
    else:
        alike = Use(name="", device="", threads=1 if len(engine.workers) > 1 else 0)
        workers = [(speed, alike) for speed in engine.workers]
    here = crew.open_here() if workers else ""
    for number, (speed, use) in enumerate(workers, start=1):
        name = f"{'worker' if alone else 'here'}-{number}"
        identity, folder = crew.admit(name), private / name
        save_node(folder, identity)
        work = {"address": here, "run": str(run.path), "speed": speed, "link": engine.link}
        command = worker_command(name, use, crew=folder, **work)
        with storage_errors(run.logs), open(run.logs / f"{name}.txt", "ab") as talk:
            children.start(name, command, environment=use.environment, stderr=talk)
