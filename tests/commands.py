"""Run the command `train` on a small task, in this process or in one of its own, and observe and stop the training."""

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from cuadrilla.crew.bundle import files_hash
from cuadrilla.rundir import RunDir, file_sha256, last_rows, read_jsonl
from tests.inside import cuadrilla
from tests.runs import final_sha256

TASK = """
import numpy as np, torch
from torch import nn
from cuadrilla.model.task import TaskDefaults

class Data:
    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.x = random.standard_normal((512, 8)).astype(np.float32)
        self.y = np.sin(self.x.sum(1, keepdims=True))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return {"x": self.x[i], "y": self.y[i]}

class Sine:
    defaults = TaskDefaults(length=1)
    def model(self): return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    def loss(self, model, batch): return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])
    def data(self, split): return Data(split == "val")
    def data_hash(self): return "sine"
    def evaluate(self, model, batches):
        sums = [self.loss(model, batch) for batch in batches]
        return {"loss": sum(float(a) for a, _ in sums) / sum(n for _, n in sums)}

def task(): return Sine()
"""

UNHURRIED = """
import os, time

class Data(Data):
    def __getitem__(self, i):
        if os.getpid() != {pid}: time.sleep(0.001)
        return super().__getitem__(i)
"""
"""Appended to `TASK`: processes other than this one sleep at each example. It suits tests in which the run only has to
go on: the CPU is left to what they test, and one worker soon repeats the few steps for comparison. It is strict, and
machines that join must trust its code."""

RUN = """
schema = 1
[task]
kind = "file"
path = "task.py:task"
[train]
steps = {steps}
batch_sequences = 64
unit_sequences = 8
precision = "fp32"
threads = 1
[optim]
kind = "adamw"
[checkpoint]
every_seconds = 0
every_steps = 50
[evaluate]
every_tokens = 1_000_000
"""

COMMAND = [sys.executable, "-m", "cuadrilla"]
ENDLESS = 100_000
"""Steps of a run that a test stops. No machine is fast enough to come to its end by itself."""
TAIL_BYTES = 16_384


def make_run(folder: Path, *, steps: int = ENDLESS, unhurried: bool = False) -> RunDir:
    folder.mkdir()
    (folder / "task.py").write_text(TASK + unhurried * UNHURRIED.format(pid=os.getpid()))
    (folder / "run.toml").write_text(RUN.format(steps=steps) + unhurried * "[sync]\nstrict = true\n")
    return RunDir(folder)


def train(run: RunDir, *arguments: str, code: int | None = None) -> subprocess.CompletedProcess[str]:
    """Train to the end, in this process; workers that are processes are real ones. Returns exit code and output."""
    return cuadrilla("train", run.run_file, *arguments, code=code)


def start(run: RunDir, *arguments: str, **options: object) -> "subprocess.Popen[str]":
    return begin("train", run.run_file, *arguments, **options)


def task_hash(folder: Path) -> str:
    """The hash with which a machine's owner approves the code of the run in this folder."""
    return files_hash({"task.py": file_sha256(folder / "task.py")})


def begin(*arguments: object, **options: object) -> "subprocess.Popen[str]":
    """Start any command in a process that obeys Ctrl-C, even where the tests run in the background and ignore it."""
    settings = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, **options}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([*COMMAND, *map(str, arguments)], preexec_fn=heard, **settings)


def wait_for(
    condition: Callable[[], bool],
    process: "subprocess.Popen[str] | None" = None,
    *,
    seconds: float = 150,
    every_seconds: float = 0.02,
) -> None:
    """Wait until the condition holds. Fails after `seconds`, a generous limit, or when the process ends before.

    `every_seconds`: longer where the condition is costly to check and stays true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        assert process is None or process.poll() is None, f"ended early: {said_by(process)[-2000:]}"
        time.sleep(every_seconds)


def said_by(process: "subprocess.Popen[str]") -> str:
    """Wait for a process and return its output: its stderr, or the file of its machine (`Machine.talk`)."""
    talk: Path | None = getattr(process, "talk", None)
    if talk is None:
        return process.communicate(timeout=150)[1] or ""
    process.wait(timeout=150)
    return talk.read_text()


def run_program(
    *command: object, code: int = 0, seconds: float = 150, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run any program in a process of its own, which must end with this exit code in so many seconds."""
    options = {"capture_output": True, "text": True, **options}
    done = subprocess.run([*map(str, command)], timeout=seconds, check=False, **options)
    assert done.returncode == code, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    return done


def ended(process: "subprocess.Popen[str]", *, code: int = 0) -> str:
    """Wait for a process, which must end with this code, and return its output."""
    said = said_by(process)
    assert process.returncode == code, said
    return said


def stop(process: "subprocess.Popen[str]") -> str:
    """Let a training save and stop, as `cuadrilla stop` and Ctrl-C do, and return its output."""
    process.terminate()
    said = ended(process, code=130)
    assert "Traceback" not in said
    return said


def is_what_one_worker_gives(run: RunDir, *sets: str, begun_in: RunDir | None = None) -> bool:
    """Assert that every version has its row. Return whether the newest weights are those of one undisturbed worker.

    `begun_in`: the run in which the first versions were made, if it was another one; its rows are not checked.
    """
    rows = last_rows(run.metrics)
    versions, steps = [row["version"] for row in rows], [row.get("steps", 1) for row in rows]
    assert versions == list(itertools.accumulate(steps[1:], initial=versions[0] if begun_in else steps[0]))
    with tempfile.TemporaryDirectory() as folder:
        alone = RunDir(Path(folder))
        for path in (begun_in or run).path.glob("*"):
            if path.name in ("run.toml", "data", "teachers") or path.suffix == ".py":
                (alone.path / path.name).symlink_to(path)
        cuadrilla("train", folder, *sets, "--stop-at", str(versions[-1]), code=0)
        return final_sha256(alone.path) == final_sha256(run.path)


def coordinator(crew: "subprocess.Popen[str]") -> psutil.Process:
    """The coordinating process, which is the only child of the process that was started."""
    (child,) = psutil.Process(crew.pid).children()
    return child


def newest_version(run: RunDir) -> int:
    """The newest version that has its row. Only the end of the file is read, since tests that wait call this often."""
    try:
        with open(run.metrics, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = file.read().decode(errors="replace")
    except FileNotFoundError:
        return 0
    return max((int(version) for version in re.findall(r'"version": (\d+).*\n', tail)), default=0)


def reached(run: RunDir, version: int) -> Callable[[], bool]:
    return lambda: newest_version(run) >= version


def goes_on(run: RunDir, *, steps: int = 5) -> Callable[[], bool]:
    """Whether the run has made `steps` more than now. On a slow machine it may not have made any yet."""
    return reached(run, newest_version(run) + steps)


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run.events) if row["event"] == kind]


def joined(run: RunDir, number: int) -> Callable[[], bool]:
    return lambda: len(events(run, "joined")) >= number
