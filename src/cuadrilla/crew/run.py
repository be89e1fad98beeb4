"""Train one run directory: under its lock, with its log and its sinks, by the engine that its run file names.

Callers are the commands and the Python API. What is said goes to the `Audience`; nothing here prints.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuadrilla.config import AutoSync, CrewEngine, LocalEngine, WindowsSync
from cuadrilla.errors import ConfigError
from cuadrilla.host.facts import read_environment
from cuadrilla.host.torchrun import Place, find_place
from cuadrilla.log import log_to, stop_logging_to
from cuadrilla.messages import Message
from cuadrilla.plan.decide import Decision, decide
from cuadrilla.rundir import FolderLock, RunDir, make_private, write_json
from cuadrilla.runfile import Resolved, dump
from cuadrilla.train.alarms import Alarms

if TYPE_CHECKING:
    from cuadrilla.crew.island import Island
    from cuadrilla.crew.up import Opening
    from cuadrilla.train.runtime import Outcome
    from cuadrilla.train.setup import RunContext
    from cuadrilla.train.sinks import Sink

RequestStop = Callable[[str], None]
"""Takes the reason."""


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Callbacks of a training's caller.

    `tell` gets a line for a person. `sinks(context)` returns more sinks. `stopping` takes a function that has the
    training save and stop; it returns a context in which the training runs.
    """

    tell: Callable[[str], None] = lambda _text: None
    stopping: Callable[[RequestStop], AbstractContextManager[None]] = lambda _request_stop: nullcontext()
    sinks: "Callable[[RunContext], Sequence[Sink]]" = lambda _context: ()


def train_run(
    resolved: Resolved,
    folder: RunDir,
    *,
    allow_changes: bool = False,
    stop_at: int = 0,
    opening: "Opening | None" = None,
    audience: Audience | None = None,
) -> "Outcome":
    """Train to the end, to step `stop_at`, or until it is asked to stop. A run that has begun is resumed.

    `opening`: how to open a crew that is not practice. Under torchrun all ranks call this and train the run together;
    only rank 0 writes to `folder`. Raises CuadrillaError, or what a user's task raised.
    """
    audience = audience or Audience()
    engine = resolved.config.engine
    with ExitStack() as stack:
        place = find_place()
        island = stack.enter_context(all_ranks(place, engine=engine))
        if island is not None and not island.place.leads:
            from cuadrilla.crew.island import follow
            from cuadrilla.train.runtime import Outcome

            return Outcome(**follow(island, (resolved.config, folder.path), stopping=audience.stopping))
        stack.enter_context(FolderLock(folder.lock))
        make_private(folder.logs)
        stack.callback(stop_logging_to, log_to(folder.logs, worker="coordinator"))
        alarms = stack.enter_context(Alarms(resolved.config.alarm, run=folder))
        from cuadrilla.crew.local import run_local
        from cuadrilla.train.setup import assemble, make_task
        from cuadrilla.train.teachers import keep_teachers

        config, decisions = decide(resolved.config, folder)
        task = make_task(config, folder.path)
        keep_teachers(config, folder, task=task)
        if island is not None:
            island.share(config)
            island.take_device(config.train.device)
        sinks: list[Sink] = []
        context = assemble(config, folder, task=task, sinks=sinks, allow_changes=allow_changes, stop_at=stop_at)
        context.store.on_event = alarms.on_event
        parameters = sum(parameter.numel() for parameter in context.model.parameters())
        size = {"num_steps": context.length.num_steps, "parameters": parameters}
        write_json(folder.config, {"values": dump(context.config), "origins": resolved.origins, **size}, private=True)
        write_json(folder.env, read_environment(), private=True)
        sinks.extend(stack.enter_context(closing(sink)) for sink in audience.sinks(context))
        introduce(context, decisions, tell=audience.tell)
        with audience.stopping(context.coordination.request_stop):
            match engine:
                case LocalEngine() if island is not None:
                    from cuadrilla.crew.island import lead

                    return lead(context, island, tell=audience.tell)
                case LocalEngine():
                    return run_local(context)
                case CrewEngine():
                    from cuadrilla.crew.up import Opening, run_crew

                    return run_crew(context, folder, opening=opening or Opening())


def all_ranks(
    place: Place | None, *, engine: LocalEngine | CrewEngine | None = None
) -> "AbstractContextManager[Island | None]":
    """The island of all ranks, if torchrun has started several; else None. `engine`: of the run, if these ranks are to
    coordinate it. Raises ConfigError for a run that several ranks cannot train as one worker."""
    if place is None:
        return nullcontext()
    if isinstance(engine, CrewEngine):
        raise ConfigError(
            "torchrun has started {ranks} ranks, which are one worker together, and this run asks for others",
            ranks=place.num_ranks,
            hint='leave engine.kind at "local", or start it without torchrun',
        )
    from cuadrilla.crew.island import joined

    return joined(place)


def introduce(context: "RunContext", decisions: Sequence[Decision], *, tell: Callable[[str], None]) -> None:
    """Say what is trained, and with what. Settings that were decided for the run go to the log."""
    config, counted = context.config, context.task.defaults.counted
    tell(
        Message(
            "model      {millions:.2f} M parameters\n"
            "device     {device}, {precision}\n"
            "run        {steps:,} steps of {tokens:,} {counted}",
            millions=sum(parameter.numel() for parameter in context.model.parameters()) / 1e6,
            device=context.device,
            precision=context.precision,
            steps=context.length.num_steps,
            tokens=context.length.step_tokens,
            counted=counted,
        )
    )
    if (workers := len(config.engine.workers)) > 1:
        tell(Message("workers    {workers}", workers=workers))
    if isinstance(config.sync, WindowsSync):
        tell(Message("           in windows of {steps}", steps=config.sync.steps))
    elif isinstance(config.sync, AutoSync):
        tell(
            Message("           results are merged after every step, or after several where that is faster (sync.kind)")
        )
    if context.resumed_at:
        tell(Message("resumed    at step {step}", step=context.resumed_at))
    for decided in decisions:
        logging.getLogger(__name__).info("%s is %g: %s", decided.key, decided.value, decided.reason)
