"""Child programs of this process, coordinators and workers: how they are started, restarted, signalled and ended.

Invariants
* A child ends with this process, even if that is killed: the child's standard input is a pipe that only this process
  holds open, and the child watches it (`end_with_parent`).
* A program that a signal has ended (SIGKILL, SIGSEGV, the kernel that ran out of memory) may be started again, until
  `MAX_DEATHS` deaths without progress between them, or a worker's within `STEADY_SECONDS`. One that ended with an exit
  code is not started again.
* On standard output a worker writes one thing: the error that ended it, as JSON, or why it is done.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from cuadrilla.errors import CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.messages import Message

MAX_DEATHS = 3
STEADY_SECONDS = 600.0
"""A worker is given up after `MAX_DEATHS` deaths within this time."""
FINISH_SECONDS = 10.0
"""Time to end for a child that is asked to stop: it finishes its pass first."""


def cuadrilla_command(*arguments: str) -> list[str]:
    """This program with these arguments."""
    return [sys.executable, "-m", "cuadrilla", *arguments]


def end_with_parent() -> None:
    """In a child: end when the parent does. Standard input is empty from now on."""
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns at the end of the parent, which writes nothing
    os._exit(LinkError.exit_code)


class Deaths:
    """The last deaths of one program. `progress` returns a value that changes with each step."""

    def __init__(self, progress: Callable[[], object] = lambda: None, *, within_seconds: float = math.inf) -> None:
        self._progress, self._within_seconds = progress, within_seconds
        self._last: deque[tuple[object, float]] = deque(maxlen=MAX_DEATHS)

    def allow(self, _signal: int = 0) -> bool:
        """Note one more death; return whether to start the program again."""
        self._last.append((self._progress(), time.monotonic()))
        (before, first), (now, last) = self._last[0], self._last[-1]
        return len(self._last) < MAX_DEATHS or now != before or last - first > self._within_seconds


class Children:
    """Children of this process, by name. `died(name, reason)` is called for each that did not end in order."""

    def __init__(self, *, died: Callable[[str, Message], None] = lambda _name, _reason: None) -> None:
        self._died = died
        self._programs: dict[str, tuple[Callable[[], subprocess.Popen[str]], Callable[[int], bool]]] = {}
        self._answers: dict[str, IO[bytes]] = {}
        self.alive: dict[str, subprocess.Popen[str]] = {}
        self.last_words: dict[str, str] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stderr: IO[bytes] | None = None,
        again: Callable[[int], bool] = lambda _signal: False,
        answers: bool = True,
        apart: bool = False,
    ) -> None:
        """`environment`: variables besides this process's own. Neither it nor `command` holds secrets. `again`: whether
        to restart the child after this signal. Without `answers` the child writes to our standard output. `apart`: in a
        process group of its own, which a terminal's Ctrl-C does not reach.
        """

        def run() -> "subprocess.Popen[str]":
            if answers:
                self._answers[name] = tempfile.TemporaryFile()  # noqa: SIM115  # it is read when the child has ended
            out, env, group = self._answers.get(name), {**os.environ, **environment}, 0 if apart else None
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=stderr, text=True, env=env, process_group=group
            )

        self._programs[name] = run, again
        self.alive[name] = run()

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.alive.items()}

    def poll(self) -> dict[str, int]:
        """Collect ended children and their output; restart some. Returns exit codes, or minus the signal, by name."""
        ended = {name: process for name, process in self.alive.items() if process.poll() is not None}
        for name, process in ended.items():
            del self.alive[name]
            _cut_off(process)
            self.last_words[name] = said = self._answer(name)
            if process.returncode:
                self._died(name, reason_of(said, process.returncode))
            run, again = self._programs[name]
            if process.returncode < 0 and again(-process.returncode):
                self.alive[name] = run()
        return {name: process.returncode for name, process in ended.items()}

    def _answer(self, name: str) -> str:
        """The child's standard output."""
        if name not in self._answers:
            return ""
        with self._answers.pop(name) as file:
            file.seek(0)
            return file.read().decode(errors="replace")

    def failure(self) -> CuadrillaError:
        """Why no worker is left: the newest error that a worker has written."""
        for said in reversed(self.last_words.values()):
            if words := _parse(said):
                error = CuadrillaError(words["error"], hint=words.get("hint", ""))
                error.exit_code = int(words["exit_code"])
                return error
        return EnvironmentProblem("all worker processes were killed", hint="run the same command again: it continues")

    def end(self, *, finish_seconds: float = FINISH_SECONDS) -> None:
        """Let the children finish; kill those that do not in this time."""
        deadline = time.monotonic() + finish_seconds
        for name, process in self.alive.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
            _cut_off(process)
            self._answer(name)
        self.alive.clear()


def _cut_off(process: "subprocess.Popen[str]") -> None:
    """Close a child's standard input, with which the child ends."""
    assert process.stdin is not None
    process.stdin.close()


def _parse(said: str) -> Mapping[str, str] | None:
    try:
        words = json.loads(said)
    except ValueError:
        return None
    return words if isinstance(words, dict) and "error" in words else None


def reason_of(said: str, returncode: int) -> Message:
    """Why a child did not end in order: the error that it wrote, or its exit code or signal."""
    if words := _parse(said):
        return Message("{error} (exit code {code})", error=words["error"], code=returncode)
    if returncode < 0:
        text = "signal {number} ({name}): was there enough memory?" if returncode == -9 else "signal {number} ({name})"
        return Message(text, number=-returncode, name=str(signal.strsignal(-returncode)))
    return Message("exit code {code}", code=returncode)
