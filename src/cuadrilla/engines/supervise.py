"""The coordinator's parent: a small process without torch that starts the coordinator again when it is killed.

`supervise` runs a command of ours as a child and waits. A child that a signal ends (SIGKILL, SIGSEGV, SIGABRT, the
kernel that ran out of memory) is started again: the same command resumes, from checkpoint and journal. An exit code is
an answer, and is passed on.

Invariants
* The child is a process group of its own, and what the parent receives is forwarded: Ctrl-C in a terminal, `kill` and
  a signal to the whole group each reach the child exactly once. (Both in one group: Ctrl-C would be seen twice, and
  twice means leave at once.) So it is the terminal's background: it may write there, not read.
* Who asked for an end gets it: after SIGINT or SIGTERM nothing is started again; nor after the SIGHUP of a closed
  terminal, where the child serves a port.
* A parent that is killed takes the child with it: the child reads from a pipe whose only writer is the parent.
* Three deaths in a row without a step between them are no accident, and end it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from cuadrilla.errors import EnvironmentProblem, LinkError, ResourceError
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, append_event, read_jsonl

MAX_FRUITLESS = 3
RESTARTED = "coordinator restarted"
LOOK_SECONDS = 1.0
WISHES = ("SIGINT", "SIGTERM", "SIGHUP")
"""Deaths by these are no accidents."""


def supervise(
    arguments: Sequence[str], run: RunDir, *, report: Callable[[str], None], listener: socket.socket | None = None
) -> int:
    """Run `cuadrilla ARGUMENTS`, which trains `run`, until it ends by itself; its exit code.

    `report` hears of each new start. `listener`: the port that the child serves. It stays open here while the child is
    away: nobody else can get it, and who dials meanwhile waits. Raises EnvironmentProblem when the child dies again and
    again.
    """
    lifeline, ours = os.pipe()
    handed_on = (lifeline, *([listener.fileno()] if listener else []))
    flags = [f"--supervised={lifeline}", *([f"--listener={listener.fileno()}"] if listener else [])]
    command = [sys.executable, "-m", "cuadrilla", *flags, *arguments]
    fruitless, progress = 0, _progress(run)
    try:
        with _Forwarder.of_signals(ends_with_terminal=listener is not None) as forwarder:
            while True:
                code = forwarder.run(command, handed_on=handed_on)
                if code >= 0:
                    return code
                killed_by = _name(-code)
                if forwarder.asked or killed_by in WISHES:
                    return 128 - code
                before, progress = progress, _progress(run)
                fruitless = 0 if progress != before else fruitless + 1
                if fruitless == MAX_FRUITLESS:
                    raise EnvironmentProblem(
                        "the coordinator died {times} times without a step in between (the last time by {signal})",
                        times=fruitless,
                        signal=killed_by,
                        hint="SIGKILL: is there enough memory? If so, see {logs}; the same command continues",
                        logs=run.logs,
                    )
                restarted = "the coordinator was killed ({signal}); it restarts and resumes"
                report(Message(restarted, signal=killed_by))
                try:
                    append_event(run.events, RESTARTED, reason=killed_by)
                except ResourceError as error:
                    report(error.message)
    finally:
        os.close(ours)
        os.close(lifeline)


def was_restarted(run: RunDir) -> bool:
    """Whether the run's coordinator is being started again: nothing has happened since its parent said so."""
    rows = deque(read_jsonl(run.events), maxlen=1)
    return bool(rows) and rows[0].get("event") == RESTARTED


def end_with(lifeline: int) -> None:
    """End this process as soon as the other end of the pipe is closed, which is when its parent's life ends."""
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(LinkError.exit_code)


def leave_terminal() -> None:
    """A process in the terminal's background that reads from it gets an error; it would stop without a word."""
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)


class _Forwarder:
    """Starts one child after the other and hands on signals. Used by the main thread."""

    def __init__(self, *, ends_with_terminal: bool) -> None:
        self.asked = False
        self._ends_with_terminal = ends_with_terminal
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: deque[int] = deque()

    @classmethod
    @contextmanager
    def of_signals(cls, *, ends_with_terminal: bool) -> Iterator["_Forwarder"]:
        forwarder = cls(ends_with_terminal=ends_with_terminal)
        wanted = {
            signal.SIGINT: forwarder._forward,
            signal.SIGTERM: forwarder._forward,
            signal.SIGTSTP: forwarder._pause,
            signal.SIGCONT: forwarder._go_on,
        }
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the child is to ignore it, too
            wanted[signal.SIGHUP] = forwarder._forward
        before = {number: signal.signal(number, action) for number, action in wanted.items()}
        try:
            yield forwarder
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    def run(self, command: Sequence[str], *, handed_on: Sequence[int]) -> int:
        """One child from start to end; its exit code, or minus the signal that ended it."""
        self._child = subprocess.Popen(command, process_group=0, pass_fds=handed_on)
        self._hand_on()
        try:
            while True:
                # Not one long wait: a signal that comes just before the system call would be handled behind it only.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._child.wait(timeout=LOOK_SECONDS)
        finally:
            self._child = None

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or number != signal.SIGHUP or self._ends_with_terminal
        self._waiting.append(number)
        self._hand_on()

    def _hand_on(self) -> None:
        """Each signal once, also when another one interrupts this."""
        with contextlib.suppress(IndexError):
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


def _progress(run: RunDir) -> int:
    """Grows with every commit."""
    try:
        return run.metrics.stat().st_size
    except FileNotFoundError:
        return 0


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return Message("signal {number}", number=number)
