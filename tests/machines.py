"""What cuadrilla takes for several machines: each has its own home folder, and may have its own network namespace."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, read_jsonl, read_object
from tests.commands import COMMAND, ENDLESS, ended, task_hash, wait_for
from tests.inside import cuadrilla

LANGUAGE_RUN = """
[data]
folder = "data"
[model]
layers = 1
heads = 2
width = 32
context = 32
[train]
steps = {steps}
batch_sequences = 8
unit_sequences = 1
precision = "fp32"
threads = 1
[optim]
kind = "adamw"
[sync]
strict = true
[sample]
tokens = 0
[checkpoint]
every_seconds = 0
"""
UNHURRIED = "[0.1]"
"""`engine.workers` for a worker beside the coordinator that sleeps nine tenths of the time. It suits tests in which the
run only has to go on: the CPU is left to what they test, and one worker soon repeats the few steps for comparison."""


def language_run(folder: Path, data: Path, *, steps: int = ENDLESS) -> RunDir:
    """The folder of a strict run of a small GPT-2 on prepared text; nothing is started."""
    folder.mkdir()
    (folder / "data").symlink_to(data)
    (folder / "run.toml").write_text(LANGUAGE_RUN.format(steps=steps))
    return RunDir(folder)


class Machine:
    """`prefix` goes before every command, for example to enter a network namespace.

    `talk`: a file for the output of its processes. Those that run for long would fill a pipe that no test reads.
    """

    def __init__(
        self, home: Path, *, prefix: tuple[str, ...] = (), address: str = "127.0.0.1", talk: Path | None = None
    ) -> None:
        self.home = home
        self.talk = talk
        self.prefix = prefix
        self.address = address
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, says: str = "") -> "subprocess.Popen[str]":
        return self.start_program(*COMMAND, *arguments, says=says)

    def start_program(self, *command: str, says: str = "") -> "subprocess.Popen[str]":
        with self._output() as output:
            process = subprocess.Popen(
                [*self.prefix, *command], env=self.environment(), text=True,
                stdin=subprocess.PIPE, stdout=output, stderr=output,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as at a terminal
            )  # fmt: skip
        process.talk = self.talk  # type: ignore[attr-defined]  # for `said_by`
        self.started.append(process)
        assert process.stdin is not None
        process.stdin.write(says)
        process.stdin.close()
        process.stdin = None
        return process

    def run(self, *arguments: str, says: str = "", code: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end: in this interpreter if the machine has no prefix, else in a process.

        `code`: the exit code that it must have.
        """
        if not self.prefix:
            return cuadrilla(*arguments, env=self.environment(), says=says, code=code)
        done = subprocess.run(
            [*self.prefix, *COMMAND, *arguments], env=self.environment(), input=says,
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert code in (None, done.returncode), f"exit code {done.returncode}: {done.stderr}"
        return done

    def trust(self, run: RunDir) -> None:
        """Approve the run's code, as the owner of this machine."""
        Home(self.home).trust(task_hash(run.path))

    @contextmanager
    def _output(self) -> Iterator[int | IO[str]]:
        if self.talk is None:
            yield subprocess.PIPE
            return
        with self.talk.open("a") as file:
            yield file

    def environment(self) -> dict[str, str]:
        return {**os.environ, "CUADRILLA_HOME": str(self.home)}

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


Machines = Callable[[str], Machine]
"""Gives the machine of a name, which is made when it is first asked for."""


def up(machine: Machine, run: RunDir, port: int, *more: str, workers: str = "[]") -> "subprocess.Popen[str]":
    arguments = ("up", str(run.path), "--listen", f"{machine.address}:{port}", "--set", f"engine.workers={workers}")
    home = Home(machine.home)
    before = read_object(home.open_file)  # left over from a coordinator that was killed
    process = machine.start(*arguments, *more)
    wait_for(lambda: read_object(home.open_file) not in ({}, before), process)
    return process


def invite(machine: Machine, *arguments: str) -> str:
    return machine.run("invite", *arguments, code=0).stdout


def down(coordinator: Machine, crew: "subprocess.Popen[str]") -> str:
    """Stop the crew with the command `stop`, and return the output of its coordinator."""
    coordinator.run("stop", code=0)
    said = ended(crew, code=130)
    assert "Traceback" not in said
    return said


def present(run: RunDir) -> set[str]:
    here: set[str] = set()
    for row in read_jsonl(run.events):
        if row["event"] == "joined":
            here.add(row["worker"])
        elif row["event"] in ("left", "evicted"):
            here.discard(row["worker"])
    return here
