"""`cuadrilla queue`: trains the runs that a text file names, each on one machine of the crew."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.crew import DialledAddress, ListenAddress, Uses
from cuadrilla.cli.jobs import crew_executor, do_jobs, local_executor
from cuadrilla.cli.output import emit_table, say
from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, RunDir, make_private, typed, write_json

if TYPE_CHECKING:
    from cuadrilla.jobs.queue import QueuedRun


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

    work, folder = RunQueue(file, tell=_tell), RunDir(file.resolve().with_suffix(".crew"))
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


def _tell(run: "QueuedRun") -> None:
    from cuadrilla.jobs.queue import RUNNING

    more = run.place if run.state == RUNNING else run.reason
    say("{run}   {state}: {more}" if more else "{run}   {state}", run=run.line, state=Message(run.state), more=more)
