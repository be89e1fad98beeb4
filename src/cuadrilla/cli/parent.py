"""How commands are stopped. Those that coordinate run twice: as a small parent, and as its child that does the work."""

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
from cuadrilla.rundir import RunDir

STOPPING = Message("stopping   after this pass; once more: at once, without saving")


def under_a_parent(run: RunDir, *, listen: str = "") -> None:
    """Returns in the child. In the process that a person started: run the same command as a child, then typer.Exit.

    `listen`: where the child is to listen. Raises LinkError when nobody can.
    Not on Windows, which knows no signals: there a coordinator that dies is started again by hand.
    """
    if options.supervised or os.name == "nt":
        return
    if listen:
        check_free(listen)
    try:
        code = supervise(sys.argv[1:], run, report=_report, ends_with_terminal=bool(listen))
    except EnvironmentProblem:  # the child that would have told it was killed
        from cuadrilla.config import AlarmSection
        from cuadrilla.runfile import read_run_config
        from cuadrilla.train.alarms import Alarms

        with Alarms(read_run_config(run).alarm if run.config.exists() else AlarmSection(), run=run):
            raise
    raise typer.Exit(code)


def stopping(request_stop: Callable[[str], object]) -> AbstractContextManager[None]:
    """While the block runs the first Ctrl-C asks to stop, and is answered; the second ends the process."""
    return stop_on_signals(request_stop, answer=partial(say_at_once, STOPPING))


def pid_to_signal() -> int:
    """The process that a person stops when this one coordinates."""
    return os.getppid() if options.supervised else os.getpid()


def _report(text: str) -> None:
    stderr.show_cursor()  # a progress bar that was killed has left it hidden
    say(text)
