"""`cuadrilla tune` and `cuadrilla queue`: whole runs as jobs, done by this machine and by machines that join."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.config import RunFile, Sets
from cuadrilla.cli.crew import DialledAddress, ListenAddress, Uses, coordinating, show_opened
from cuadrilla.cli.output import advise, emit_table, say
from cuadrilla.cli.parent import stopping
from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.link.address import listening_address
from cuadrilla.messages import Message
from cuadrilla.monitor.screen import duration
from cuadrilla.rundir import FolderLock, RunDir, make_private, typed, write_json
from cuadrilla.runfile import read_run_file

if TYPE_CHECKING:
    from cuadrilla.config import Config
    from cuadrilla.jobs.crew import CrewExecutor
    from cuadrilla.jobs.executor import Ended, Executor, JobSource
    from cuadrilla.jobs.local import LocalExecutor
    from cuadrilla.jobs.queue import QueuedRun
    from cuadrilla.tune.search import Search


def tune(
    run: RunFile = Path("run.toml"),
    sets: Sets = None,
    crew: Annotated[
        bool, typer.Option("--crew", help="Machines that join do trials, too; prints what to type on them.")
    ] = False,
    listen: ListenAddress = "",
    address: DialledAddress = "",
    uses: Uses = 1,
    here: Annotated[bool, typer.Option("--here/--not-here", help="With --crew: this machine does trials, too.")] = True,
) -> None:
    """Try combinations of settings, as the section `tune` of the run file says, and name the best.

    Each trial is a run in RUN/tune.
    With --crew the machines that join with `cuadrilla join` do trials, each as fast as it can.
    Ctrl-C saves and stops; the same command goes on.
    """
    from cuadrilla.tune.search import open_search

    run_file = RunDir(run).run_file
    with open_search(run_file, sets=sets or []) as search:
        _tell_begin(search)
        search.tell = partial(_tell_end, search)
        executors: list[AbstractContextManager[Executor]] = []
        if here or not crew:
            config = read_run_file(run_file, sets=sets or []).config
            executors.append(local_executor(logs=search.folder / "logs", config=config))
        if crew:
            executors.append(crew_executor(search.folder, listen=listen, address=address, uses=uses))
        is_stopped = do_jobs(search, executors)
    _report_search(search)
    if is_stopped:
        say("\nthe search was stopped; the same command goes on")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _tell_begin(search: "Search") -> None:
    say(
        "search     {number} trials of {settings} settings by {sampler}, in {folder}",
        number=search.num_trials,
        settings=len(search.section.space),
        sampler=search.section.sampler,
        folder=typed(search.folder),
    )
    if search.ended_trials:
        say("resumed    {number} trials are finished", number=len(search.ended_trials))


def _tell_end(search: "Search", ended: "Ended", score: float | None) -> None:
    from cuadrilla.tune.folder import describe
    from cuadrilla.tune.search import job_of

    seconds = search.seconds_left()
    say(
        "{name}   {outcome}{mark}   {values}   ({done} of {most}{left})",
        name=ended.job,
        outcome=Message("failed: {reason}", reason=ended.reason)
        if score is None
        else Message("{value:.4f}", value=score),
        mark=Message("  best so far") if search.best and job_of(search.best) == ended.job else "",
        values=describe(search.trial(ended.job).params),
        done=len(search.ended_trials),
        most=search.num_trials,
        left=Message(", about {time} more", time=duration(seconds)) if seconds else "",
    )


def _report_search(search: "Search") -> None:
    """Print the trials, and what to type next."""
    from cuadrilla.tune.folder import BEST
    from cuadrilla.tune.search import job_of

    emit_table(search.table())
    best = search.best
    if best is None and search.ended_trials:
        say("\nall trials that have ended have failed; the reasons stand above")
    elif best is None:
        say("\nno trial has finished yet")
    else:
        advise(f"eval {typed(search.run(job_of(best)).path)}")
        run = typed(search.run(BEST).path)
        say("      cuadrilla train {run}    (a run of its own with these settings)", run=run)


def queue(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A text file with the folder of a run on each line, the next first.")
    ] = Path("queue.txt"),
    listen: ListenAddress = "",
    address: DialledAddress = "",
    uses: Uses = 1,
    here: Annotated[bool, typer.Option("--here/--not-here", help="This machine trains, too.")] = True,
) -> None:
    """Train the runs that a text file names, in its order: each by one machine, this one or one that joins.

    Edit the file at any time: add a line to add a run, move it up to have it sooner, delete it to stop the run.
    Ends when every run has ended. Weights and figures come back into the runs' folders here.
    Ctrl-C saves and stops; the same command goes on.
    """
    from cuadrilla.jobs.queue import FAILED, RunQueue

    work, folder = RunQueue(file, tell=_tell_run), RunDir(file.resolve().with_suffix(".crew"))
    make_private(folder.path)
    with FolderLock(folder.lock):
        write_json(folder.status, {"state": "running"}, private=True)
        say("queue      {file}; runs: {number}; Ctrl-C saves and stops", file=typed(file), number=len(work.table()))
        joined = crew_executor(folder.path, listen=listen, address=address, uses=uses)
        is_stopped = do_jobs(work, [*([local_executor(logs=folder.logs)] if here else []), joined])
        write_json(folder.status, {"state": "stopped" if is_stopped else "complete"}, private=True)
    emit_table(table := work.table())
    if is_stopped:
        say("the queue was stopped; the same command goes on")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    if any(row["state"] == FAILED for row in table):
        raise typer.Exit(1)


def _tell_run(run: "QueuedRun") -> None:
    from cuadrilla.jobs.queue import RUNNING

    more = run.place if run.state == RUNNING else run.reason
    say("{run}   {state}: {more}" if more else "{run}   {state}", run=run.line, state=Message(run.state), more=more)


def do_jobs(work: "JobSource", executors: "Sequence[AbstractContextManager[Executor]]") -> bool:
    """Have jobs done until all are, or until Ctrl-C; then running ones are saved. Returns whether it was Ctrl-C."""
    from cuadrilla.jobs.executor import hand_out

    stopped = threading.Event()
    with ExitStack() as stack:
        ready = [stack.enter_context(each) for each in executors]
        stack.enter_context(stopping(lambda _reason: stopped.set()))
        hand_out(work, ready, stop=stopped)
    return stopped.is_set()


def local_executor(*, logs: Path, config: "Config | None" = None) -> "AbstractContextManager[LocalExecutor]":
    """The executor of this machine, for runs of `config` (None: for any): one run on each accelerator, or one if there
    is none. Raises DeviceError.
    """
    from cuadrilla.crew.equipment import choose_uses
    from cuadrilla.jobs.local import LocalExecutor
    from cuadrilla.plan.devices import Use

    uses = [use for use in choose_uses(config=config).uses if use.device not in ("", "cpu")]
    if not uses or (config is not None and config.train.device != "auto"):
        uses = [Use(name="", device="", threads=0)]
    return closing(LocalExecutor({f"here-{number}": use for number, use in enumerate(uses, 1)}, logs=logs))


@contextmanager
def crew_executor(folder: Path, *, listen: str, address: str, uses: int) -> Iterator["CrewExecutor"]:
    """The executor of the machines that join. `folder`: the search or the queue. Raises ConfigError, LinkError."""
    from cuadrilla.jobs.crew import CrewExecutor

    with (
        coordinating() as home,
        closing(CrewExecutor(home, listen=listening_address(listen), folder=folder)) as executor,
    ):
        show_opened(executor.crew, folder=folder, address=address, uses=uses)
        yield executor
