"""A search whose trials run on a Ray cluster: the results of this machine, whoever dies; Ctrl-C; what is refused."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import COMMAND, TASK, wait_for
from tests.inside import cuadrilla
from tests.ports import free_port
from tests.spawn.test_ray import Head
from tests.spawn.test_tune import make_search, results
from tests.spawn.test_tune_function import BOWL, decided, write

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'),
]

STEPS = 200
AMID = 75
"""Passes after which a process that trains waits: there has been a checkpoint, after 50 steps."""
WAITS = (
    TASK.replace("batch): return (model", "batch):\n        wait()\n        return (model")
    + """
import time
from pathlib import Path

passes = 0

def wait():
    global passes
    passes += 1
    while passes == %d and not Path(%r).exists():
        time.sleep(0.01)
"""
)
TUNE = """
[tune]
sampler = "random"
trials = 2
rungs = 2
factor = 2
seed = 3
[tune.space]
optim.lr = {low = 0.0001, high = 0.1, log = true}
"""
OTHER_VERSION = """
from cuadrilla.engines.ray.jobs import JobMailbox, RayJobConnection
from cuadrilla.engines.ray.worker import RayPlace
from cuadrilla.jobs.ray_node import do_ray_jobs
from cuadrilla.link.offer import RunDescription

description = RunDescription(config="", files=(), cuadrilla="0.0.1", takes_jobs=True)
do_ray_jobs(RayPlace(name="ana"), RayJobConnection(JobMailbox(), description))
"""
Results = dict[str, tuple[dict[str, Any], float | None]]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A machine that offers two places."""
    head = Head(tmp_path_factory.mktemp("cluster") / "head", token="0123456789abcdef" * 4, offers=2)
    wait_for(head.listens)
    yield head
    head.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What this machine finds alone."""
    folder = make_search(tmp_path_factory.mktemp("alone") / "search", steps=STEPS, tune=TUNE)
    done = cuadrilla("tune", folder)
    assert done.returncode == 0, done.stderr
    return results(folder)


def make_waiting(folder: Path, head: Head) -> tuple[Path, Path]:
    """A search whose trials wait in the middle, and the file that they wait for."""
    go = folder.with_name("go")
    make_search(folder, steps=STEPS, tune=TUNE)
    (folder / "task.py").write_text(WAITS % (AMID, str(go)))
    head.approve(RunDir(folder))
    return folder, go


@contextmanager
def searching(folder: Path, head: Head) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*COMMAND, "tune", str(folder), "--ray", head.address],
        env=os.environ | head.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def processes(head: Head, word: str) -> list[psutil.Process]:
    """Of the cluster, those with that word in their command."""
    found = []
    for process in psutil.Process(head.process.pid).children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found


def trainers(head: Head) -> list[psutil.Process]:
    return processes(head, "work-on")


def actors(head: Head) -> list[psutil.Process]:
    return processes(head, "RayJobActor")


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    path = folder / "tune" / "trials.jsonl"
    return [row for row in read_jsonl(path) if row["event"] == event] if path.exists() else []


def all_amid(folder: Path) -> bool:
    """Whether of both trials a checkpoint has come back."""
    runs = [RunDir(folder / "tune" / f"t{trial:04d}-r0") for trial in range(2)]
    return all((run.checkpoints / "v00000050").exists() for run in runs)


@pytest.mark.ray_smoke
def test_the_results_are_those_of_this_machine_whoever_dies(head: Head, undisturbed: Results, tmp_path: Path) -> None:
    """Of one trial the process is killed that trains it, of the other one the actor that has it."""
    folder, go = make_waiting(tmp_path / "año #1? 50%", head)
    with searching(folder, head) as process:
        wait_for(lambda: all_amid(folder), process, every_seconds=0.1)
        one, other = actors(head)
        (trainer,) = (child for child in one.children() if "work-on" in child.cmdline())
        trainer.kill()
        other.kill()
        go.touch()
        said = process.communicate(timeout=150)[1]
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert results(folder) == undisturbed
    assert {row["place"] for row in rows(folder, "begun")} == {"ray-127-0-0-1/cpu", "ray-127-0-0-1/cpu.2"}
    assert [row["reason"] for row in rows(folder, "ended")] == [""] * 3
    wait_for(lambda: not trainers(head) and not actors(head))
    assert not list((head.home / "jobs").glob("*"))


def test_ctrl_c_brings_back_what_was_done_and_this_machine_goes_on(
    head: Head, undisturbed: Results, tmp_path: Path
) -> None:
    folder, go = make_waiting(tmp_path / "search", head)
    with searching(folder, head) as process:
        wait_for(lambda: all_amid(folder), process, every_seconds=0.1)
        process.send_signal(signal.SIGINT)
        go.touch()
        said = process.communicate(timeout=150)[1]
    assert process.returncode == INTERRUPTED_EXIT_CODE, said
    assert "Traceback" not in said
    wait_for(lambda: not trainers(head) and not actors(head))
    states = [json.loads((folder / "tune" / f"t000{trial}-r0" / "status.json").read_text()) for trial in range(2)]
    assert {state["state"] for state in states} == {"stopped"}
    assert all(state["version"] % 50 for state in states), "nothing was saved in between"
    done = cuadrilla("tune", folder)
    assert done.returncode == 0, done.stderr
    assert results(folder) == undisturbed


def test_a_cluster_that_has_gone_is_an_error(undisturbed: Results, tmp_path: Path) -> None:
    head = Head(tmp_path / "cluster", token="0123456789abcdef" * 4, offers=2)
    try:
        wait_for(head.listens)
        folder, go = make_waiting(tmp_path / "search", head)
        with searching(folder, head) as process:
            wait_for(lambda: all_amid(folder), process, every_seconds=0.1)
            processes(head, "gcs_server")[0].kill()
            said = process.communicate(timeout=150)[1]
    finally:
        head.stop()
    assert (process.returncode, "has gone" in said, "Traceback" in said) == (5, True, False), said
    go.touch()
    assert cuadrilla("tune", folder).returncode == 0
    assert results(folder) == undisturbed


def test_a_cluster_that_offers_nothing(tmp_path: Path) -> None:
    head = Head(tmp_path / "cluster", token="0123456789abcdef" * 4, offers=0)
    try:
        wait_for(head.listens)
        folder = make_search(tmp_path / "search", tune=TUNE)
        with searching(folder, head) as process:
            said = process.communicate(timeout=150)[1]
    finally:
        head.stop()
    assert (process.returncode, "no machine of the Ray cluster" in said, "ray start" in said) == (5, True, True), said
    assert not list((folder / "tune").glob("t*"))


def test_code_that_nobody_has_approved_ends_the_search(head: Head, tmp_path: Path) -> None:
    folder = make_search(tmp_path / "search", tune=TUNE)
    with (folder / "task.py").open("a") as code_file:
        code_file.write("\n# other code than that of the tests before\n")
    with searching(folder, head) as process:
        said = process.communicate(timeout=150)[1]
    assert (process.returncode, "has not been approved" in said, "cuadrilla trust" in said) == (5, True, True), said
    assert not list((folder / "tune").glob("t*/metrics.jsonl"))


def test_calls_of_a_function_are_made_by_the_cluster(head: Head, tmp_path: Path) -> None:
    here, there = (write(tmp_path / name, BOWL, trials=4, rungs=2, factor=2) for name in ("here", "there"))
    assert cuadrilla("tune", here).returncode == 0
    head.approve(RunDir(there), "f.py")
    with searching(there, head) as process:
        said = process.communicate(timeout=150)[1]
    assert process.returncode == 0, said
    assert decided(there) == decided(here)
    assert {row["place"].partition("/")[0] for row in rows(there, "ended")} == {"ray-127-0-0-1"}
    assert "looking at" in (there / "tune" / "t0000-r0" / "logs" / "talk.txt").read_text()


def test_a_machine_refuses_jobs_of_another_version() -> None:
    """In a process of its own: Ray reads its variables when it is imported."""
    done = subprocess.run([sys.executable, "-c", OTHER_VERSION], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Refused: the coordinator runs cuadrilla 0.0.1" in done.stderr


@pytest.mark.ray_smoke
def test_where_nobody_listens_nothing_is_trained(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "search", tune=TUNE)
    token = {"RAY_AUTH_TOKEN": "f" * 64}
    done = cuadrilla("tune", folder, "--ray", f"127.0.0.1:{free_port()}", env=os.environ | token)
    assert (done.returncode, "no Ray head answers" in done.stderr) == (5, True), done.stderr
    assert not list((folder / "tune").glob("t*"))


@pytest.mark.ray_smoke
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--together", "2"], "--ray excludes --together"),
        (["--crew"], "--ray excludes --crew"),
        (["--scheduler", "tcp://127.0.0.1:8786"], "do not go through Dask"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: list[str], said: str) -> None:
    folder = make_search(tmp_path / "search", tune=TUNE)
    done = cuadrilla("tune", folder, "--ray", "127.0.0.1:6379", *more)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
