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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from cuadrilla.crew.children import Deaths, cuadrilla_command
from cuadrilla.crew.signals import Handler, handling
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, EnvironmentProblem, ResourceError
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, append_event

POLL_SECONDS = 1.0
WISHES = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
"""Deaths by these are no accidents."""


def supervise(
    arguments: Sequence[str], run: RunDir, *, report: Callable[[str], None], ends_with_terminal: bool = False
) -> int:
    """Run `cuadrilla ARGUMENTS`, which trains `run`, until it ends by itself; its exit code.

    `report` hears of each new start. `ends_with_terminal`: a closed terminal ends the child for good. Raises
    EnvironmentProblem when it dies again and again.
    """
    forwarder, deaths = _Forwarder(ends_with_terminal=ends_with_terminal), Deaths(lambda: _num_bytes(run))
    with handling(forwarder.handlers):
        while (code := forwarder.run(cuadrilla_command("--supervised", *arguments))) < 0:
            if forwarder.num_interrupts > 1:
                return INTERRUPTED_EXIT_CODE
            if forwarder.asked or -code in WISHES:
                return 128 - code
            killed_by = _name(-code)
            if deaths.too_many():
                raise EnvironmentProblem(
                    "the coordinator died {times} times without a step in between (the last time by {signal})",
                    times=deaths.number,
                    signal=killed_by,
                    hint="SIGKILL: is there enough memory? If so, see {logs}; the same command continues",
                    logs=run.logs,
                )
            report(Message("the coordinator was killed ({signal}); it restarts and resumes", signal=killed_by))
            try:
                append_event(run.events, "coordinator restarted", reason=killed_by)
            except ResourceError as error:
                report(error.message)
    return code


class _Forwarder:
    """Starts one child after the other and hands on signals. Used by the main thread."""

    def __init__(self, *, ends_with_terminal: bool) -> None:
        self.asked = False
        self.num_interrupts = 0
        """SIGINT and SIGTERM received."""
        self._ends_with_terminal = ends_with_terminal
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: deque[int] = deque()

    @property
    def handlers(self) -> dict[int, Handler | signal.Handlers]:
        found: dict[int, Handler | signal.Handlers] = {
            signal.SIGINT: self._forward,
            signal.SIGTERM: self._forward,
            signal.SIGTSTP: self._pause,
            signal.SIGCONT: self._go_on,
        }
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the child is to ignore it, too
            found[signal.SIGHUP] = self._forward
        return found

    def run(self, command: Sequence[str]) -> int:
        """One child from start to end; its exit code, or minus the signal that ended it."""
        with subprocess.Popen(command, process_group=0, stdin=subprocess.PIPE) as self._child:
            self._hand_on()
            try:
                while True:
                    # Not one long wait: a signal that comes just before the system call would be handled behind it.
                    with suppress(subprocess.TimeoutExpired):
                        return self._child.wait(timeout=POLL_SECONDS)
            finally:
                self._child = None

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or number != signal.SIGHUP or self._ends_with_terminal
        self.num_interrupts += number != signal.SIGHUP
        self._waiting.append(number if self.num_interrupts < 2 else signal.SIGKILL)  # a stopped process gets no other
        self._hand_on()

    def _hand_on(self) -> None:
        """Each signal once, also when another one interrupts this."""
        with suppress(IndexError):
            while self._child is not None:
                self._child.send_signal(self._waiting.popleft())

    def _pause(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: everybody stops, and the shell notices."""
        self._signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _go_on(self, _number: int, _frame: FrameType | None) -> None:
        self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.returncode is None:
            os.killpg(self._child.pid, number)


def _num_bytes(run: RunDir) -> int:
    """Of its metrics, which grow with every commit."""
    try:
        return run.metrics.stat().st_size
    except FileNotFoundError:
        return 0


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return Message("signal {number}", number=number)
