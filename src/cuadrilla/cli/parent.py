"""How commands are stopped. A command that coordinates runs as a small parent and a child, which does the work."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import typer

from cuadrilla.cli.output import options, say, say_at_once, stderr
from cuadrilla.crew.signals import stop_on_signals
from cuadrilla.crew.supervise import supervise
from cuadrilla.errors import EnvironmentProblem
from cuadrilla.link.address import check_free
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, RunDir

STOPPING = Message("stopping   after this pass; once more: at once, without saving")


def under_a_parent(run: RunDir, *, listen: str = "") -> None:
    """Run this command again as a child, and raise typer.Exit when it ends. In the child itself, return at once.

    `listen`: the address on which the child will listen. Raises LinkError if it cannot be used.
    On Windows, which has no signals, this returns at once: a coordinator that dies must be started again by hand.
    """
    if options.supervised or os.name == "nt":
        return
    with FolderLock(run.lock):  # raises the error that names another process that trains the run
        pass
    if listen:
        check_free(listen)
    try:
        code = supervise(sys.argv[1:], run, report=_report, ends_with_terminal=bool(listen))
    except EnvironmentProblem:  # the child, which sends alarms, was killed
        from cuadrilla.runfile import read_run_config
        from cuadrilla.train.alarms import Alarms

        with Alarms(read_run_config(run).alarm, run=run):
            raise
    raise typer.Exit(code)


def stopping(request_stop: Callable[[str], object]) -> AbstractContextManager[None]:
    """Within this block the first Ctrl-C requests a stop and prints an answer; the second ends the process."""
    return stop_on_signals(request_stop, answer=partial(say_at_once, STOPPING))


def _report(text: str) -> None:
    if stderr.is_terminal:  # the killed child's progress bar has left the cursor hidden behind itself
        stderr.show_cursor()
        stderr.print()
    say(text)
