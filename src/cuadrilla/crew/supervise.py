"""The coordinator's parent: a small process without torch that starts the coordinator again when it is killed.

The same command resumes, from checkpoint and journal.

Invariants
* The child is a process group of its own, and what the parent receives is forwarded: Ctrl-C in a terminal, `kill` and
  a signal to the whole group each reach the child exactly once. (Both in one group: Ctrl-C would be seen twice, and
  twice means leave at once.)
* Who asked for an end gets it: after SIGINT or SIGTERM nothing is started again; nor after the SIGHUP of a closed
  terminal, where the child serves a port. A second SIGINT or SIGTERM kills the child, even a frozen one.
"""

import os
import signal
import subprocess
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from cuadrilla.crew.children import Deaths, cuadrilla_command
from cuadrilla.crew.signals import handling
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, EnvironmentProblem, ResourceError
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, append_event

POLL_SECONDS = 0.1


def supervise(
    arguments: Sequence[str], run: RunDir, *, report: Callable[[str], None], ends_with_terminal: bool = False
) -> int:
    """Run `cuadrilla ARGUMENTS`, which trains `run`, until it ends by itself; its exit code.

    `report` hears of each new start. `ends_with_terminal`: a closed terminal ends the child for good. Raises
    EnvironmentProblem when it dies again and again.
    """
    heard: Counter[int] = Counter()
    pending: deque[int] = deque()

    def hear(number: int, _frame: FrameType | None) -> None:
        heard[number] += 1
        pending.append(number if num_interrupts() < 2 else signal.SIGKILL)  # a stopped process gets no other

    def num_interrupts() -> int:
        return heard[signal.SIGINT] + heard[signal.SIGTERM]

    forwarded = [signal.SIGINT, signal.SIGTERM, signal.SIGTSTP]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the child is to ignore it, too
        forwarded.append(signal.SIGHUP)
    deaths = Deaths(lambda: run.metrics.stat().st_size if run.metrics.exists() else 0)  # it grows with every commit
    with handling(dict.fromkeys(forwarded, hear)):
        while (code := _run(cuadrilla_command("--supervised", *arguments), pending)) < 0:
            if num_interrupts() > 1:
                return INTERRUPTED_EXIT_CODE
            asked = num_interrupts() or (ends_with_terminal and heard[signal.SIGHUP])
            if asked or -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                return 128 - code
            killed_by = signal.Signals(-code).name
            if deaths.too_many():
                raise EnvironmentProblem(
                    "the coordinator died {times} times without a step in between (the last time by {signal})",
                    times=deaths.number,
                    signal=killed_by,
                    hint="SIGKILL: is there enough memory? If so, see {logs}; the same command continues",
                    logs=run.logs,
                )
            report(Message("the coordinator was killed ({signal}); it restarts and resumes", signal=killed_by))
            with suppress(ResourceError):
                append_event(run.events, "coordinator restarted", reason=killed_by)
    return code


def _run(command: Sequence[str], pending: deque[int]) -> int:
    """One child from start to end; its exit code, or minus the signal that ended it. Each of the `pending` signals is
    handed on once; Ctrl-Z stops everybody, and the shell notices."""
    with subprocess.Popen(command, process_group=0, stdin=subprocess.PIPE) as child:
        while True:
            while pending:
                if (number := pending.popleft()) != signal.SIGTSTP:
                    child.send_signal(number)
                    continue
                os.killpg(child.pid, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)  # until the shell lets it go on
                os.killpg(child.pid, signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=POLL_SECONDS)
