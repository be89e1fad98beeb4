"""Commands that coordinate run twice: as a small parent, and as its child that does the work and may be killed."""

import os
import sys

import typer

from cuadrilla.cli.output import options, say, stderr
from cuadrilla.crew.supervise import supervise
from cuadrilla.errors import EnvironmentProblem
from cuadrilla.link.address import check_free
from cuadrilla.rundir import RunDir


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


def pid_to_signal() -> int:
    """The process that a person stops when this one coordinates."""
    return os.getppid() if options.supervised else os.getpid()


def _report(text: str) -> None:
    stderr.show_cursor()  # a progress bar that was killed has left it hidden
    say(text)
