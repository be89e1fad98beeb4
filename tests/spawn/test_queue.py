"""Queued runs that a joining machine trains: the results are those of training here."""

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cuadrilla.home import Home
from cuadrilla.jobs.executor import Ended
from cuadrilla.jobs.local import LocalExecutor
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import RunDir, last_rows, read_object
from tests.commands import RUN, TASK, is_what_one_worker_gives, make_run, reached, said_by, wait_for
from tests.inside import cuadrilla
from tests.machines import Machine, invite, language_run

LOOK_SECONDS = 0.1
DIGITS = """
class Images(Data):
    def __init__(self, folder):
        self.x, self.y = np.load(folder / "images.npy"), np.load(folder / "digits.npy")

class Digits(Sine):
    def __init__(self, folder): self.folder = folder
    def data(self, split): return Images(self.folder / split)
    def data_hash(self): return str(sum(self.data(split).y.sum() for split in ("train", "val")))
"""


def hand_out(machine: Machine, *runs: RunDir, port: int = 0) -> "subprocess.Popen[str]":
    """Hand out runs, which are named in a file in the home folder of the machine."""
    if runs:
        queue_file(machine).write_text("".join(f"{run.path}\n" for run in runs))
    process = machine.start("queue", str(queue_file(machine)), "--json", "--listen", f"127.0.0.1:{port}", "--not-here")
    wait_for(lambda: Home(machine.home).open_file.exists(), process)
    return process


def queue_file(machine: Machine) -> Path:
    return machine.home.parent / "queue.txt"


def state(run: RunDir) -> str | None:
    return read_object(run.status).get("state")


def test_what_comes_back(coordinator: Machine, ana: Machine, stories: Path, tmp_path: Path) -> None:
    """A line is deleted while its run is trained. The machine stays between runs. The weights have the bits of one
    worker here."""
    uno, long = language_run(tmp_path / "uno", stories, steps=12), language_run(tmp_path / "largo", stories)
    process = hand_out(coordinator, long, uno)
    working = ana.start("join", "--name", "ana", says=invite(coordinator))
    wait_for(reached(long, 5), process, every_seconds=LOOK_SECONDS)
    assert "in use" in cuadrilla("train", str(long.path), code=2).stderr
    assert state(uno) is None
    queue_file(coordinator).write_text(f"{uno.path}\n")
    assert process.wait(timeout=150) == 0
    assert working.wait(timeout=60) == 0
    assert (state(long), state(uno)) == ("stopped", "complete")
    assert is_what_one_worker_gives(uno)
    kept = max(int(path.name[1:]) for path in long.checkpoints.glob("v*"))
    assert kept >= 5, "what was stopped has been saved, and is here"
    assert cuadrilla("eval", str(uno.path)).returncode == 0
    assert not list(Home(ana.home).jobs.glob("*/*/runs/*"))
    again = coordinator.run("queue", str(queue_file(coordinator)), "--json", "--listen", "127.0.0.1:0", code=0)
    rows = json.loads(again.stdout[again.stdout.index("[") :])
    assert [(Path(row["run"]).name, row["state"]) for row in rows] == [("uno", "complete")]


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_killed_coordinator_and_a_machine_that_comes_back(coordinator: Machine, ana: Machine, tmp_path: Path) -> None:
    """The same commands continue. A machine that leaves with Ctrl-C saves first."""
    run = make_run(tmp_path / "uno", steps=400, unhurried=True)
    ana.trust(run)
    process = hand_out(coordinator, run)
    port = int(json.loads(Home(coordinator.home).open_file.read_text())["address"].rpartition(":")[2])
    working = ana.start("join", "--name", "ana", says=invite(coordinator))
    wait_for(lambda: newest(run) > 0, process, every_seconds=LOOK_SECONDS)
    process.kill()
    process.wait()
    Home(coordinator.home).open_file.unlink()
    before = newest(run)
    process = hand_out(coordinator, port=port)
    wait_for(lambda: newest(run) > before, working, every_seconds=LOOK_SECONDS)
    working.send_signal(signal.SIGINT)
    assert working.wait(timeout=60) == 130
    wait_for(lambda: state(run) == "stopped", process, every_seconds=LOOK_SECONDS)
    assert newest(run) == max(row["version"] for row in last_rows(run.metrics)), "nothing that it has done is lost"
    working = ana.start("join")
    assert process.wait(timeout=150) == 0
    assert state(run) == "complete"
    assert is_what_one_worker_gives(run)
    assert working.wait(timeout=60) == 0


def newest(run: RunDir) -> int:
    return max((int(path.name[1:]) for path in run.checkpoints.glob("v*")), default=0)


def digits_run(folder: Path) -> RunDir:
    """A run of ten steps, with four small files in `data/`."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, number in (("train", 512), ("val", 64)):
        (folder / "data" / split).mkdir(parents=True)
        np.save(folder / "data" / split / "images.npy", random.standard_normal((number, 8)).astype(np.float32))
        np.save(folder / "data" / split / "digits.npy", random.integers(0, 10, (number, 1)).astype(np.float32))
    (folder / "task.py").write_text(TASK + DIGITS)
    named = RUN.format(steps=10).replace("task.py:task", 'task.py:Digits"\ndata = "data/')
    (folder / "run.toml").write_text(f"{named}[sync]\nstrict = true\n")
    return RunDir(folder)


@pytest.mark.thorough
def test_a_run_takes_its_data_to_the_machine_that_trains_it(coordinator: Machine, ana: Machine, tmp_path: Path) -> None:
    run = digits_run(tmp_path / "run")
    process = hand_out(coordinator, run)
    ana.trust(run)
    worker = ana.start("join", "--name", "ana", says=invite(coordinator))
    assert process.wait(timeout=150) == 0
    assert "MB (files: 4)" in said_by(worker)
    assert is_what_one_worker_gives(run)


# -- processes of this machine -----------------------------------------------------------------------------------------


HERE = {"here": Use(name="", device="", threads=1)}


def ended(executor: LocalExecutor) -> Ended:
    """The job that ends next."""
    left: list[Ended] = []
    wait_for(lambda: left.extend(executor.poll()) or bool(left))
    return left[0]


def test_a_task_may_print_as_much_as_it_likes_and_one_that_ends_its_process_has_lost_its_job(tmp_path: Path) -> None:
    """It prints more than a pipe holds."""
    prints, exits = (make_run(tmp_path / name, steps=4) for name in ("uno", "dos"))
    loss, executor = "def loss(self, model, batch):", LocalExecutor(HERE, logs=tmp_path / "logs")
    (prints.path / "task.py").write_text(TASK.replace(loss, f'{loss} print("x" * 40_000);'))
    (exits.path / "task.py").write_text("import os\n" + TASK.replace(loss, f"{loss} os._exit(0);"))
    try:
        executor.start("uno", prints, place="here")
        assert ended(executor).complete
        executor.start("dos", exits, place="here")
        left = ended(executor)
    finally:
        executor.close()
    assert (tmp_path / "logs" / "here.txt").stat().st_size > 2**17
    assert (left.lost, left.reason) == (True, "its process ended without a result")


def test_what_is_recalled_while_it_is_made_ready_is_given_back(stories: Path, tmp_path: Path) -> None:
    """The job's process locks the run before it loads torch; the recall comes in between."""
    run = language_run(tmp_path / "uno", stories)
    executor = LocalExecutor(HERE, logs=tmp_path / "logs")
    try:
        executor.start("uno", run, place="here")
        wait_for(run.lock.exists)
        executor.preempt("uno")
        left = ended(executor)
    finally:
        executor.close()
    assert (left.job, left.complete, left.reason) == ("uno", False, "")
