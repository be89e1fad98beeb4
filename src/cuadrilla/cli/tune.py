"""`cuadrilla tune`: a search for better settings, by trials that are runs."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.config import RunFile, Sets, folder_of
from cuadrilla.cli.crew import DialledAddress, ListenAddress, Uses
from cuadrilla.cli.jobs import crew_executor, do_jobs, local_executor
from cuadrilla.cli.output import advise, emit_table, say
from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.messages import Message
from cuadrilla.monitor.screen import duration
from cuadrilla.rundir import RunDir, typed
from cuadrilla.runfile import read_run_file

if TYPE_CHECKING:
    from cuadrilla.jobs.executor import Ended, Executor
    from cuadrilla.tune.search import Search

SHOWN_BEST = 5


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
    from cuadrilla.tune.folder import TUNE
    from cuadrilla.tune.search import open_search

    run_file, folder = RunDir(run).run_file, folder_of(run).path / TUNE
    with open_search(run_file, sets=sets or []) as search:
        _tell_begin(search)
        search.tell = partial(_tell_end, search)
        executors: list[AbstractContextManager[Executor]] = []
        if here or not crew:
            config = read_run_file(run_file, sets=sets or []).config
            executors.append(local_executor(logs=folder / "logs", config=config))
        if crew:
            executors.append(crew_executor(folder, listen=listen, address=address, uses=uses))
        is_stopped = do_jobs(search, executors)
    _report(search)
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


def _report(search: "Search") -> None:
    """Print the best trials, and what to type next."""
    from cuadrilla.tune.folder import BEST
    from cuadrilla.tune.search import job_of

    emit_table(search.table(), most=SHOWN_BEST)
    best = search.best
    if best is None and search.ended_trials:
        say("\nall trials that have ended have failed; the reasons stand above")
    elif best is None:
        say("\nno trial has finished yet")
    else:
        advise(f"eval {typed(search.run(job_of(best)).path)}")
        run = typed(search.run(BEST).path)
        say("      cuadrilla train {run}    (a run of its own with these settings)", run=run)
