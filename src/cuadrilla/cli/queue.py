"""`cuadrilla queue`: runs that wait for a machine of the crew; lists, adds, reorders, stops, and hands them out."""

import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cuadrilla.cli.config import folder_of
from cuadrilla.cli.crew import DialledAddress, ListenAddress, Uses
from cuadrilla.cli.jobs import crew_executor, local_executor
from cuadrilla.cli.output import emit_table, say
from cuadrilla.cli.parent import stopping
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError
from cuadrilla.home import Home
from cuadrilla.messages import Message
from cuadrilla.monitor.jobs import queue_jobs
from cuadrilla.rundir import FolderLock, RunDir, is_held, make_private, read_object, typed
from cuadrilla.runfile import read_run_config, read_run_file

if TYPE_CHECKING:
    from cuadrilla.jobs.executor import Executor
    from cuadrilla.jobs.queue import QueuedRun, RunQueue

LOCK = "lock"
"""A file in the queue's folder, locked by the process that hands the runs out."""


def queue(
    action: Annotated[
        Literal["list", "add", "first", "stop", "remove", "work"],
        typer.Argument(metavar="[list|add|first|stop|remove|work]", help="What to do (default: list the queue)."),
    ] = "list",
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN…", help="Runs by their folders.")] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="add: a machine, or cuda, mps, xpu, cpu, to train them (default: any)."),
    ] = None,
    listen: ListenAddress = "",
    address: DialledAddress = "",
    uses: Uses = 1,
    here: Annotated[bool, typer.Option("--here/--not-here", help="work: this machine trains, too.")] = True,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="work: end when every run of the queue has ended.")
    ] = False,
) -> None:
    """Runs that wait for a machine: each is trained by one machine of the crew, in their order.

    `add`, `first`, `stop` and `remove` change the queue; `work` hands it out, on this machine and to those that join
    with `cuadrilla join`, until Ctrl-C. Weights and figures come back into the runs' folders here.
    """
    from cuadrilla.jobs.queue import RunQueue

    folder = Home.of_user().queue
    queue = RunQueue(folder, is_handed_out=is_held(folder / LOCK))
    if bool(runs) != (action in ("add", "first", "stop", "remove")):
        hint = "cuadrilla queue add RUN" if action == "add" else "cuadrilla queue shows them"
        raise ConfigError("name the runs" if not runs else "{action} takes no runs", action=action, hint=hint)
    match action:
        case "add":
            for added in [_checked(queue, run) for run in runs or ()]:  # all are checked before one is added
                queue.add(added, on=tuple(on or ()))
        case "first" | "stop" | "remove":
            change = {"first": queue.put_first, "stop": queue.stop, "remove": queue.remove}[action]
            for found in [queue.find(run) for run in runs or ()]:
                change(found)
        case "work":
            _work(RunQueue(folder), listen=listen, address=address, uses=uses, here=here, until_empty=until_empty)
    if action != "work":
        _list(queue)


def _checked(queue: "RunQueue", named: str) -> RunDir:
    """The run's folder. Raises ConfigError if it is no run, if it is complete, or while a machine trains it."""
    train, run = read_run_file(Path(named)).config.train, folder_of(Path(named))
    if read_object(run.status).get("state") == "complete":
        trained = read_run_config(run).train
        if (train.tokens, train.epochs, train.steps) == (trained.tokens, trained.epochs, trained.steps):
            hint = "for more, let its run.toml say more steps; or name another run"
            raise ConfigError("{run} has been trained to its end", run=named, hint=hint)
    queue.require_free(run)
    return run


def _list(queue: "RunQueue") -> None:
    kept = ("run", "state", "machine", "step", "reason")
    rows = [
        {"number": number, **{key: job[key] for key in kept}} for number, job in enumerate(queue_jobs(queue), start=1)
    ]
    if not rows:
        say("nothing is in the queue; next: cuadrilla queue add RUN")
    emit_table(rows)


def _work(queue: "RunQueue", *, listen: str, address: str, uses: int, here: bool, until_empty: bool) -> None:
    """Hand the queue out. Raises typer.Exit if it was interrupted."""
    from cuadrilla.jobs.executor import hand_out
    from cuadrilla.jobs.queue import QueueWork

    folder = Home.of_user().queue
    stopped = threading.Event()
    make_private(folder)
    with ExitStack() as stack:
        stack.enter_context(FolderLock(folder / LOCK, purpose=Message("handing out the queue")))
        others = stack.enter_context(crew_executor(folder, listen=listen, address=address, uses=uses))
        executors: list[Executor] = [others]
        if here:
            executors.insert(0, stack.enter_context(closing(local_executor(logs=folder / "logs"))))
        work = QueueWork(queue, tell=_tell, until_empty=until_empty)
        stack.enter_context(stopping(lambda _reason: stopped.set()))
        say("queue      in {folder}; runs: {number}; Ctrl-C saves and stops", folder=folder, number=len(queue.runs()))
        hand_out(work, executors, stop=stopped)
    if stopped.is_set():
        say("the queue was stopped; the same command goes on")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _tell(run: "QueuedRun", state: str, place: str, reason: str) -> None:
    from cuadrilla.jobs.queue import RUNNING

    folder = typed(run.run.path)
    more = place if state == RUNNING else reason
    say("{run}   {state}: {more}" if more else "{run}   {state}", run=folder, state=Message(state), more=more)
