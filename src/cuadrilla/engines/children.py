"""Worker processes that this one starts: they end with it, and what each said last is kept.

A child's standard input is a pipe from here that nobody writes to, so that it ends when this process does; on standard
output it says one thing: as JSON the error that ended it, or why it is done.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from cuadrilla.errors import CuadrillaError, EnvironmentProblem
from cuadrilla.host.memory import num_killed_for_memory
from cuadrilla.messages import Message

READ_BYTES = 2**16
FINISH_SECONDS, END_SECONDS = 10.0, 5.0
"""A child that has been told to stop finishes its pass first; then it is cut off, then killed."""

KILLED_FOR_MEMORY = (
    "{reason}, and the kernel has killed processes for lack of memory: "
    "use a smaller model, smaller units or more memory"
)


class Children:
    """`died(name, reason)` is called for each that ended otherwise than in order."""

    def __init__(self, *, died: Callable[[str, Message], None]) -> None:
        self._died = died
        self._killed_for_memory = num_killed_for_memory()
        self.alive: dict[str, subprocess.Popen[str]] = {}
        self.last_words: dict[str, str] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stderr: IO[bytes] | None = None,
    ) -> None:
        """`environment`: variables beside this process's own. Secrets are in neither."""
        self.alive[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **environment},
        )

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.alive.items()}

    def look(self) -> dict[str, int]:
        """Notice who has ended, and what it said last: exit codes by name, or minus the signal."""
        ended = {name: process for name, process in self.alive.items() if process.poll() is not None}
        killed = [name for name, process in ended.items() if process.returncode == -signal.SIGKILL]
        short = bool(killed) and self._memory_ran_out()
        for name, process in ended.items():
            del self.alive[name]
            _cut_off(process)
            assert process.stdout is not None
            self.last_words[name] = said = _last_words(process.stdout)
            process.stdout.close()
            if process.returncode:
                reason = reason_of(said, process.returncode)
                if short and name in killed:
                    reason = Message(KILLED_FOR_MEMORY, reason=reason)
                self._died(name, reason)
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
        """Let them finish; whoever does not is killed."""
        for patience, act in ((finish_seconds, _cut_off), (END_SECONDS, subprocess.Popen.kill)):
            deadline = time.monotonic() + patience
            for process in self.alive.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
            for process in self.alive.values():
                if process.poll() is None:
                    act(process)
        for process in self.alive.values():
            _cut_off(process)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.alive.clear()


def _last_words(pipe: IO[str]) -> str:
    """What has come: a process that it has started, and that lives on, may hold the pipe open."""
    if sys.platform != "win32":
        os.set_blocking(pipe.fileno(), False)
    parts = []
    with suppress(BlockingIOError):
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
    words = _parse(said)
    if words:
        return Message("{error} (exit code {code})", error=words["error"], code=returncode)
    return ended_by(returncode)


def ended_by(returncode: int) -> Message:
    """As `subprocess` has it: a signal is negative."""
    if returncode < 0:
        return Message("signal {number} ({name})", number=-returncode, name=str(signal.strsignal(-returncode)))
    return Message("exit code {code}", code=returncode)
