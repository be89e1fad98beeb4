"""The coordinator's parent: a small process without torch that starts the coordinator again when it is killed.

The new process resumes from checkpoint and journal.

Invariants
* The child is a process group of its own, and what the parent receives is forwarded: Ctrl-C in a terminal, `kill` and
  a signal to the whole group each reach the child exactly once. (With both in one group the child would get Ctrl-C
  twice, and twice means leave at once.)
* After SIGINT or SIGTERM nothing is started again; nor after the SIGHUP of a closed terminal, if the child serves a
  port. A second SIGINT or SIGTERM kills the child, even a frozen one.
"""

import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from cuadrilla.crew.children import MAX_DEATHS, Deaths, cuadrilla_command
from cuadrilla.crew.signals import handling
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, EnvironmentProblem, ResourceError
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, append_event

POLL_SECONDS = 0.1


def supervise(
    arguments: Sequence[str], run: RunDir, *, report: Callable[[str], None], ends_with_terminal: bool = False
) -> int:
    """Run `cuadrilla ARGUMENTS`, which trains `run`, until it ends by itself; return its exit code.

    `report` gets each restart. `ends_with_terminal`: a closed terminal ends it, unless it runs under `nohup`. Raises
    EnvironmentProblem when it dies again and again.
    """
    asked, pending, deaths = list[int](), deque[int](), Deaths(run)

    def hear(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and asked:  # kernel and shell both send it: the second one asks for nothing more
            return
        asked.append(number)
        first = signal.SIGTERM if number == signal.SIGHUP else number
        pending.append(first if len(asked) == 1 else signal.SIGKILL)  # the only one that reaches a frozen process

    ends = ends_with_terminal and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    ends_it = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with handling({**dict.fromkeys(ends_it, hear), signal.SIGHUP: hear if ends else signal.SIG_IGN}):
        while (code := _run(arguments, pending)) < 0 and not asked and -code not in ends_it:
            _note_death(deaths, run, killed_by=signal.Signals(-code).name, report=report)
    if code >= 0:
        return code
    return INTERRUPTED_EXIT_CODE if len(asked) > 1 else 128 - code


def _run(arguments: Sequence[str], pending: deque[int]) -> int:
    """Run the coordinator in a process group of its own, and send it the `pending` signals. Its standard input ends
    with this process. Return its exit code, or minus the signal that killed it."""
    command = cuadrilla_command("--supervised", *arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as child:
        while child.poll() is None:
            while pending:
                child.send_signal(pending.popleft())
            with suppress(subprocess.TimeoutExpired):
                child.wait(POLL_SECONDS)
        return child.returncode


def _note_death(deaths: Deaths, run: RunDir, *, killed_by: str, report: Callable[[str], None]) -> None:
    """Raises EnvironmentProblem if the coordinator has died too often."""
    if not deaths.allow():
        raise EnvironmentProblem(
            "the coordinator died {times} times without a step in between (the last time by {signal})",
            times=MAX_DEATHS,
            signal=killed_by,
            hint="SIGKILL: is there enough memory? If so, see {logs}; the same command continues",
            logs=run.logs,
        )
    report(Message("the coordinator was killed ({signal}); it restarts and resumes", signal=killed_by))
    with suppress(ResourceError):
        append_event(run.events, "coordinator restarted", reason=killed_by)
