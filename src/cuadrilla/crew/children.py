"""Child programs of this process, coordinators and workers: how they are started, restarted, signalled and ended.

Invariants
* A child ends with this process, even where that is killed: its standard input is a pipe that only this process holds
  open, and it watches the other end (`end_with_parent`).
* A program that a signal has ended (SIGKILL, SIGSEGV, the kernel that ran out of memory) may be started again;
  `MAX_DEATHS` in a row without progress between them are no accident. An exit code is an answer.
* On standard output a worker says one thing: as JSON the error that ended it, or why it is done.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

from cuadrilla.errors import CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.host.memory import num_killed_for_memory
from cuadrilla.messages import Message

MAX_DEATHS = 3
STEADY_SECONDS = 600.0
"""A worker that lives for so long makes progress."""
READ_BYTES = 2**16
FINISH_SECONDS, END_SECONDS = 10.0, 5.0
"""A child that has been told to stop finishes its pass first; then it is cut off, then killed."""
KILLED_FOR_MEMORY = (
    "{reason}, and the kernel has killed processes for lack of memory: "
    "use a smaller model, smaller units or more memory"
)

log = logging.getLogger(__name__)


def cuadrilla_command(*arguments: str) -> list[str]:
    """This program with these arguments."""
    return [sys.executable, "-m", "cuadrilla", *arguments]


def end_with_parent() -> None:
    """In a child: end as soon as the parent does. What runs here finds nothing on its standard input."""
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(LinkError.exit_code)


class Deaths:
    """Of one program. `progress`: a value that changes with each step forward."""

    def __init__(self, progress: Callable[[], object]) -> None:
        self._progress, self._last = progress, progress()
        self.number = 0

    def too_many(self) -> bool:
        """Whether one more is the last of too many."""
        before, self._last = self._last, self._progress()
        self.number = self.number + 1 if self._last == before else 0
        return self.number >= MAX_DEATHS


class Children:
    """Workers. `died(name, reason)` is called for each that ended otherwise than in order."""

    def __init__(self, *, died: Callable[[str, Message], None]) -> None:
        self._died = died
        self._killed_for_memory = num_killed_for_memory()
        self._programs: dict[str, tuple[Callable[[], subprocess.Popen[str]], Deaths | None]] = {}
        self.alive: dict[str, subprocess.Popen[str]] = {}
        self.last_words: dict[str, str] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stderr: IO[bytes] | None = None,
        restarts: bool = False,
    ) -> None:
        """`environment`: variables beside this process's own. Secrets are in neither."""
        pipe, variables = subprocess.PIPE, {**os.environ, **environment}
        run = partial(subprocess.Popen, command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=variables)
        self._programs[name] = run, Deaths(lambda: time.monotonic() // STEADY_SECONDS) if restarts else None
        self.alive[name] = run()

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.alive.items()}

    def poll(self) -> dict[str, int]:
        """Notice who has ended, and what it said last; restart. Exit codes by name, or minus the signal."""
        ended = {name: process for name, process in self.alive.items() if process.poll() is not None}
        killed = [name for name, process in ended.items() if process.returncode == -signal.SIGKILL]
        short = bool(killed) and self._memory_ran_out()
        for name, process in ended.items():
            del self.alive[name]
            self.last_words[name] = said = _last_words(process)
            if process.returncode:
                reason = reason_of(said, process.returncode)
                if short and name in killed:
                    reason = Message(KILLED_FOR_MEMORY, reason=reason)
                self._died(name, reason)
            run, deaths = self._programs[name]
            if process.returncode < 0 and deaths is not None and not deaths.too_many():
                log.warning("%s is being restarted", name)
                self.alive[name] = run()
        return {name: process.returncode for name, process in ended.items()}

    def _memory_ran_out(self) -> bool:
        """A process that the kernel kills for memory ends like any other that is killed; only a counter tells."""
        before, self._killed_for_memory = self._killed_for_memory, num_killed_for_memory()
        return self._killed_for_memory != before

    def failure(self) -> CuadrillaError:
        """Why there is no worker left: the error of the last one that could still say it."""
        for said in reversed(self.last_words.values()):
            if words := _parse(said):
                error = CuadrillaError(words["error"], hint=words.get("hint", ""))
                error.exit_code = int(words["exit_code"])
                return error
        return EnvironmentProblem("all worker processes were killed", hint="run the same command again: it continues")

    def end(self, *, finish_seconds: float = FINISH_SECONDS) -> None:
        """Let them finish; whoever does not is cut off, then killed."""
        for patience, act in ((finish_seconds, _cut_off), (END_SECONDS, subprocess.Popen.kill)):
            deadline = time.monotonic() + patience
            for process in self.alive.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
            for process in self.alive.values():
                if process.poll() is None:
                    act(process)
        for process in self.alive.values():
            process.wait()
            _last_words(process)
        self.alive.clear()


def _last_words(process: "subprocess.Popen[str]") -> str:
    """What has come: a process that it has started, and that lives on, may hold the pipe open."""
    _cut_off(process)
    assert process.stdout is not None
    if sys.platform != "win32":
        os.set_blocking(process.stdout.fileno(), False)
    parts = []
    with suppress(BlockingIOError), process.stdout as pipe:
        while part := os.read(pipe.fileno(), READ_BYTES):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")


def _cut_off(process: "subprocess.Popen[str]") -> None:
    """A worker process ends when its standard input does."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it was told something when it had just ended
        process.stdin.close()


def _parse(said: str) -> Mapping[str, str] | None:
    try:
        words = json.loads(said)
    except ValueError:
        return None
    return words if isinstance(words, dict) and "error" in words else None


def reason_of(said: str, returncode: int) -> Message:
    """Why a child ended otherwise than in order: what it said last, or its exit code."""
    if words := _parse(said):
        return Message("{error} (exit code {code})", error=words["error"], code=returncode)
    if returncode < 0:
        return Message("signal {number} ({name})", number=-returncode, name=str(signal.strsignal(-returncode)))
    return Message("exit code {code}", code=returncode)
