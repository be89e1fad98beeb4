"""Train one run directory: under its lock, with its log and its sinks, by the engine that its run file names.

Callers are the commands and the Python API. What is said goes to the `Audience`; nothing here prints.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cuadrilla.config import (
    Config,
    CrewEngine,
    LocalEngine,
    NesterovSection,
    ServerSync,
)
from cuadrilla.errors import ConfigError
from cuadrilla.host.environment import read_environment
from cuadrilla.host.torchrun import Place, find_place
from cuadrilla.log import set_up_logging, tear_down_logging
from cuadrilla.messages import Message
from cuadrilla.plan.decide import Decision, decide
from cuadrilla.rundir import FolderLock, RunDir, make_private, write_failure, write_json
from cuadrilla.runfile import Resolved, dump
from cuadrilla.train.alarms import Alarms, reason_of

if TYPE_CHECKING:
    from cuadrilla.engines.crew import Opening
    from cuadrilla.engines.island import Island
    from cuadrilla.train.coordinate import CoordinatorRuntime, Outcome
    from cuadrilla.train.setup import RunContext
    from cuadrilla.train.sinks import Sink

RequestStop = Callable[[str], None]
"""Takes the reason."""


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Who hears of a training, and may end it.

    `tell`: a line of talk. `sinks`: more of them, once it is known what is trained. `stopping`: given the function that
    has the training save and stop, a context in which it goes on. `verbose`: the log has everything.
    """

    tell: Callable[[str], None] = lambda _text: None
    stopping: Callable[[RequestStop], AbstractContextManager[None]] = lambda _request_stop: nullcontext()
    sinks: "Callable[[RunContext], Sequence[Sink]]" = lambda _context: ()
    verbose: bool = False


def train_run(
    resolved: Resolved,
    folder: RunDir,
    *,
    allow_changes: bool = False,
    stop_at: int = 0,
    opening: "Opening | None" = None,
    audience: Audience | None = None,
) -> "Outcome":
    """Train to the end, to step `stop_at`, or until it is asked to stop; a run that was begun goes on.

    `opening`: of a crew that is not practice. Under torchrun all ranks call this and train it together; `folder` is
    rank 0's alone to write. Raises CuadrillaError, or what a user's task raised.
    """
    audience = audience or Audience()
    home, engine = opening.home if opening else None, resolved.config.engine
    nodes = opening.ray_nodes if opening else frozenset[str]()
    with ExitStack() as stack:
        island = stack.enter_context(_island(resolved.config, find_place()))
        if island is not None and not island.place.leads:
            from cuadrilla.engines.island import follow

            return follow(resolved.config, folder.path, island, stopping=audience.stopping)
        stack.enter_context(FolderLock(folder.lock, purpose=Message("training")))
        stack.enter_context(_logging_to(folder.logs, verbose=audience.verbose))
        alarms = stack.enter_context(Alarms(resolved.config.alarm, run=folder))
        word = stack.enter_context(_LastWord(folder))
        cluster = None
        if isinstance(engine, CrewEngine):
            from cuadrilla.engines.ray.cluster import cluster_of  # it imports gRPC

            cluster = stack.enter_context(cluster_of(engine, folder, practice=home is None, nodes=nodes))
        from cuadrilla.engines.local import run_local  # torch is loaded while Ray is being started
        from cuadrilla.train.setup import assemble, make_task
        from cuadrilla.train.sinks import JsonlSink
        from cuadrilla.train.teachers import keep_teachers

        sinks: list[Sink] = []
        try:
            config, decisions = decide(resolved.config, folder)
            task = make_task(config, folder.path)
            keep_teachers(config, folder, task=task)
            if island is not None:
                island.tell_settled(config)
                island.form(device=config.train.device)
            sinks.append(JsonlSink(folder.metrics))
            context = assemble(
                config,
                folder,
                task=task,
                sinks=sinks,
                divide=island.divide if island is not None and config.train.shard else None,
                allow_changes=allow_changes,
                stop_at=stop_at,
            )
            context.store.hear, word.coordination = alarms.hear, context.coordination
            write_json(folder.config, {"values": dump(context.config), "origins": resolved.origins}, private=True)
            write_json(folder.env, read_environment(), private=True)
            sinks.extend(audience.sinks(context))
            introduce(context, tell=audience.tell)
            _tell_of(decisions, tell=audience.tell)
            with audience.stopping(context.coordination.request_stop):
                match engine:
                    case LocalEngine() if island is not None:
                        from cuadrilla.engines.island import lead

                        return lead(context, island, config=config, tell=audience.tell)
                    case LocalEngine():
                        return run_local(context, tell=audience.tell)
                    case CrewEngine() if opening is not None and opening.lending is not None:
                        from cuadrilla.engines.lent import run_lent

                        return run_lent(context, folder, lending=opening.lending)
                    case CrewEngine():
                        from cuadrilla.engines.crew import Opening, run_crew

                        return run_crew(context, folder, opening=replace(opening or Opening(), cluster=cluster))
        finally:
            for sink in sinks:
                sink.close()


class _LastWord:
    """What makes a training fail is in its events, once: said by whoever coordinates, as soon as somebody does.

    Who typed something wrong (ConfigError) is there to read it, and nothing has failed.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.coordination: CoordinatorRuntime | None = None

    def __enter__(self) -> "_LastWord":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, ConfigError):
            return
        if self.coordination is not None:
            self.coordination.note_failure(error)
        elif isinstance(error, Exception):
            write_failure(self._run, reason=reason_of(error))


@contextmanager
def _island(config: Config, place: Place | None) -> "Iterator[Island | None]":
    """All ranks, where torchrun has started several."""
    if place is None:
        if config.train.shard:
            raise ConfigError(
                "train.shard divides a model among the ranks that torchrun starts, and this is one process",
                hint="torchrun --nproc-per-node 2 -m cuadrilla train RUN, or add --set train.shard=false",
            )
        yield None
        return
    from cuadrilla.engines.island import joined, require_one_worker

    require_one_worker(config, place)
    with joined(place) as island:
        yield island


@contextmanager
def _logging_to(folder: Path, *, verbose: bool) -> Iterator[None]:
    """From before Ray is started, which has its say at once."""
    make_private(folder)
    handler = set_up_logging(folder, worker="coordinator", verbose=verbose)
    try:
        yield
    finally:
        tear_down_logging(handler)


def introduce(context: "RunContext", *, tell: Callable[[str], None]) -> None:
    """What is trained, on what, and what could be chosen better."""
    from cuadrilla.train.setup import has_several_workers

    config, counted = context.config, context.task.defaults.counted
    num_parameters = sum(parameter.numel() for parameter in context.model.parameters())
    num_workers = len(config.engine.workers)
    tell(
        Message(
            "model      {millions:.2f} M parameters\n"
            "device     {device}, {precision}\n"
            "workers    {workers}\n"
            "run        {steps} steps of {tokens:,} {counted}",
            millions=num_parameters / 1e6,
            device=context.device,
            precision=context.precision,
            workers=num_workers if config.engine.kind == "local" else Message("{number} processes", number=num_workers),
            steps=context.length.num_versions,
            tokens=context.length.round_tokens,
            counted=counted,
        )
    )
    if context.resumed_at:
        tell(Message("resumed    at step {step}", step=context.resumed_at))
    if isinstance(config.sync, ServerSync) and has_several_workers(config):
        told = "sync       server: a step for each answer, staleness at most {staleness}"
        tell(Message(told, staleness=config.sync.staleness))
        for key, note in asynchronous_notes(config, config.sync):
            tell(Message("note       {key}: {note}", key=key, note=note))


def _tell_of(decisions: Sequence[Decision], *, tell: Callable[[str], None]) -> None:
    for decided in decisions:
        note = Message("{value:g}: {reason}", value=decided.value, reason=decided.reason)
        tell(Message("note       {key}: {note}", key=decided.key, note=note))


def asynchronous_notes(config: Config, sync: ServerSync) -> list[tuple[str, str]]:
    """(setting, why another value may serve better) for several asynchronous workers."""
    notes: list[tuple[str, str]] = []
    optim = config.optim
    if sync.staleness + 1 < len(config.engine.workers):
        told = "with {staleness}, only {number} workers can work at a time"
        notes.append(("sync.staleness", Message(told, staleness=sync.staleness, number=sync.staleness + 1)))
    delayed = isinstance(optim, NesterovSection) and (optim.delay > 1 or optim.momentum == 0)
    if not delayed:
        text = Message(
            "{kind} keeps momentum, and momentum of stale gradients slows asynchronous training\n           "
            '(arXiv 2401.09135); "nesterov" with optim.delay > 1 is made for this',
            kind=optim.kind,
        )
        notes.append(("optim.kind", text))
    return notes
