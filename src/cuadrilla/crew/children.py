"""Child programs of this process, coordinators and workers: how they are started, signalled and ended.

Invariants
* A child ends with this process, even if that is killed: the child's standard input is a pipe that only this process
  holds open, and the child watches it (`end_with_parent`).
* A program that a signal has ended (SIGKILL, SIGSEGV, the kernel that ran out of memory) may be started again, until
  `MAX_DEATHS` deaths without progress between them. One that ended with an exit code is not started again.
* On standard output a worker writes one thing: the error that ended it, as JSON, or why it is done.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from cuadrilla.errors import CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, last_rows

MAX_DEATHS = 3
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
    """The last deaths of a program that trains `run`."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._last: deque[object] = deque(maxlen=MAX_DEATHS)

    def allow(self) -> bool:
        """Note one more death; return whether to start the program again. Steps that it repeats are no progress."""
        self._last.append([row.get("version") for row in last_rows(self._run.metrics)][-1:])
        return len(self._last) < MAX_DEATHS or self._last[0] != self._last[-1]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a child ended. `code`: its exit code, or minus the signal. `said`: its standard output."""

    code: int
    said: str

    @property
    def error(self) -> Mapping[str, Any]:
        """The error that it wrote; {} if it wrote none."""
        with suppress(ValueError):
            words = json.loads(self.said)
            if isinstance(words, dict) and "error" in words:
                return words
        return {}

    @property
    def reason(self) -> Message:
        """Why it did not end in order: the error that it wrote, or its exit code or signal."""
        if self.error:
            return Message("{error} (exit code {code})", error=self.error["error"], code=self.code)
        if self.code < 0:
            template = (
                "signal {number} ({name})" if self.code != -9 else "signal {number} ({name}): was there enough memory?"
            )
            return Message(template, number=-self.code, name=str(signal.strsignal(-self.code)))
        return Message("exit code {code}", code=self.code)


class Children:
    """Children of this process, by name."""

    def __init__(self) -> None:
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[str, IO[bytes]] = {}
        self._error: Mapping[str, Any] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stderr: IO[bytes] | None = None,
        apart: bool = False,
    ) -> None:
        """`environment`: variables besides this process's own. Neither it nor `command` holds secrets. `apart`: in a
        process group of its own, which a terminal's Ctrl-C does not reach."""
        self._outputs[name] = tempfile.TemporaryFile()  # noqa: SIM115  # it is read when the child has ended
        env, group = {**os.environ, **environment}, 0 if apart else None
        self.alive[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._outputs[name], stderr=stderr, env=env, process_group=group
        )

    def poll(self) -> dict[str, Ending]:
        """The children that have ended since the last call."""
        ended = [name for name, process in self.alive.items() if process.poll() is not None]
        return {name: self._collect(name) for name in ended}

    def _collect(self, name: str) -> Ending:
        process = self.alive.pop(name)
        code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        with self._outputs.pop(name) as file:
            file.seek(0)
            ending = Ending(code=code, said=file.read().decode(errors="replace"))
        self._error = ending.error or self._error
        return ending

    def failure(self) -> CuadrillaError:
        """Why no worker is left: the newest error that a worker has written."""
        if not self._error:
            hint = "run the same command again: it continues"
            return EnvironmentProblem("all worker processes were killed", hint=hint)
        error = CuadrillaError(self._error["error"], hint=self._error.get("hint", ""))
        error.exit_code = int(self._error["exit_code"])
        return error

    def end(self, *, finish_seconds: float = FINISH_SECONDS) -> None:
        """Let the children finish; kill those that do not in this time."""
        deadline = time.monotonic() + finish_seconds
        for name, process in list(self.alive.items()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()
            self._collect(name)
