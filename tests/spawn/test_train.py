"""The command `train` in real processes: interrupted, killed, locked out, resumed with other values, out of disk."""

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from cuadrilla.rundir import RunDir, last_rows, read_jsonl
from cuadrilla.train.checkpoint import list_checkpoints, verify_checkpoint, version_of
from tests.commands import (
    TASK,
    ended,
    events,
    is_what_one_worker_gives,
    make_run,
    newest_version,
    reached,
    start,
    stop,
    train,
    wait_for,
)
from tests.inside import cuadrilla
from tests.runs import newest


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with steps of some milliseconds, which is not started."""
    return make_run(tmp_path / "corrida ñ")


def goes_on(run: RunDir, *sets: str) -> "CompletedProcess[str]":
    """Resume with the same command. Some steps later the weights must be those of an undisturbed run."""
    steps = newest_version(run) + 10
    done = train(run, *sets, "--stop-at", str(steps), code=0)
    assert is_what_one_worker_gives(run, *sets)
    return done


def test_one_signal_saves_and_stops_and_the_same_command_resumes(run: RunDir) -> None:
    """Before the signal, a second training in the same folder is refused."""
    process = start(run)
    wait_for(reached(run, 20), process)
    process.send_signal(signal.SIGSTOP)  # then one worker has fewer steps to repeat
    second = train(run)
    process.send_signal(signal.SIGCONT)
    assert (second.returncode, f"in use by process {process.pid}" in second.stderr) == (2, True), second.stderr
    process.send_signal(signal.SIGINT)
    said = ended(process, code=130)
    assert "the same command continues" in said
    assert "Traceback" not in said
    assert newest(run.path).state["version"] == last_rows(run.metrics)[-1]["version"]
    assert not run.lock.exists()
    goes_on(run)


@pytest.mark.thorough
def test_two_signals_leave_at_once_and_the_last_checkpoint_is_whole(run: RunDir) -> None:
    process = start(run)
    wait_for(reached(run, 60), process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    ended(process, code=130)
    for path in list_checkpoints(run.checkpoints):
        verify_checkpoint(path)
    goes_on(run)


@pytest.mark.thorough
def test_a_closed_terminal_does_not_stop_the_training(run: RunDir) -> None:
    """The training gets SIGHUP, and its stderr has no reader any more."""
    read_end, write_end = os.pipe()
    process = start(run, stderr=write_end)
    os.close(write_end)
    wait_for(reached(run, 20), process)
    os.close(read_end)
    process.send_signal(signal.SIGHUP)
    wait_for(reached(run, last_rows(run.metrics)[-1]["version"] + 60), process)
    process.terminate()
    assert process.wait(timeout=150) == 130
    assert is_what_one_worker_gives(run)


@pytest.mark.parametrize("num_kills", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_killed_again_and_again_no_committed_step_is_lost(run: RunDir, num_kills: int) -> None:
    """SIGKILL at random moments. Each time all announced steps are there, and the result is the same."""
    sets = ["--set", "sync.strict=true", "--set", "checkpoint.journal=on"]
    chance = random.Random(7)
    announced = 0
    for _ in range(num_kills):
        process = start(run, *sets)
        wait_for(reached(run, announced + chance.randrange(1, 60)), process)
        process.kill()
        _, said = process.communicate()
        if announced:
            assert int(said.split("resumed    at step ")[1].split()[0]) >= announced
        announced = newest_version(run)
    done = goes_on(run, *sets)
    assert int(done.stderr.split("resumed    at step ")[1].split()[0]) >= announced


def test_changed_values_between_stop_and_resume(run: RunDir) -> None:
    assert train(run, "--stop-at", "50").returncode == 0
    assert "run.seed (0 → 3)" in train(run, "--set", "run.seed=3", code=2).stderr
    guarded = train(run, "--set", "optim.lr=0.1", code=2)
    assert "optim.lr (0.001 → 0.1)" in guarded.stderr
    assert "--allow-changes" in guarded.stderr
    assert train(run, "--set", "optim.lr=0.1", "--allow-changes", "--stop-at", "55").returncode == 0
    task = run.path / "task.py"
    task.write_text(task.read_text().replace("64, 64", "64, 96").replace("64, 1)", "96, 1)"))
    other = train(run, "--set", "optim.lr=0.1", code=6)
    assert "belongs to another model: 2.bias float32 (64,) instead of float32 (96,)" in other.stderr


def test_damaged_checkpoints_fall_back_and_the_journal_still_loses_nothing(run: RunDir) -> None:
    journal = ("--set", "checkpoint.journal=on")
    assert train(run, *journal, "--stop-at", "120").returncode == 0
    newest = list_checkpoints(run.checkpoints)[-1]
    raw = bytearray((newest / "model.safetensors").read_bytes())
    raw[-5] ^= 1
    (newest / "model.safetensors").write_bytes(raw)
    resumed = train(run, *journal, "--stop-at", "130", code=0)
    assert "model.safetensors is missing or damaged" in resumed.stderr
    assert "resumed    at step 120" in resumed.stderr  # the older checkpoint and the journal after it
    for path in list_checkpoints(run.checkpoints):
        (path / "state.json").unlink()
    assert "Traceback" not in train(run, code=6).stderr


def test_a_full_disk_does_not_stop_the_training(run: RunDir, small_disk: Path) -> None:
    """No row is lost, no line is torn, each failure is reported once, and the result is that of an undisturbed run."""
    for path in (run.checkpoints, run.metrics, run.events, run.logs, run.tensorboard):
        path.symlink_to(small_disk / path.name)
    for folder in (run.checkpoints, run.logs, run.tensorboard):
        (small_disk / folder.name).mkdir()
    process = start(run, "--set", "checkpoint.every_steps=10")
    wait_for(lambda: len(list_checkpoints(run.checkpoints)) >= 2, process)
    fill(small_disk / "filler")
    at_least = step_of(run) + 30
    wait_for(lambda: step_of(run) >= at_least, process)
    for path in list_checkpoints(run.checkpoints):
        verify_checkpoint(path)
    (small_disk / "filler").unlink()
    wait_for(reached(run, at_least + 30), process)
    said = stop(process)
    newest = last_rows(run.metrics)[-1]["version"]
    assert version_of(list_checkpoints(run.checkpoints)[-1]) == newest
    assert [row["version"] for row in read_jsonl(run.metrics)] == [*range(1, newest + 1)]
    assert all(json.loads(line) for path in (run.events, run.metrics) for line in path.read_text().splitlines())
    kinds = [row["event"] for row in read_jsonl(run.events)]
    assert (kinds.count("finished"), "alarm" in kinds) == (1, True)
    assert kinds.count("alarm") == said.count("; training goes on") <= 8
    assert "Logging error" not in said
    assert list(run.tensorboard.iterdir())


def step_of(run: RunDir) -> int:
    return int(json.loads(run.status.read_text())["version"])


def fill(path: Path) -> None:
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_what_a_run_leaves(run: RunDir) -> None:
    done = cuadrilla("train", str(run.path), "--set", "train.steps=5", "--json", code=0)  # the flag holds anywhere
    result = json.loads(done.stdout)
    assert (result["version"], result["complete"]) == (5, True)
    assert json.loads(run.status.read_text())["state"] == "complete"
    assert json.loads(run.config.read_text())["origins"]["train.steps"] == "--set"
    assert json.loads(run.env.read_text())["packages"]["torch"]
    assert (run.logs / "log.coordinator.txt").exists()
    assert events(run, "finished")[0]["complete"] is True
    assert train(run, "--set", "train.steps=5").returncode == 0
    assert [row["version"] for row in read_jsonl(run.metrics)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("line", "broken", "message"),
    [
        ('batch["y"]).square', 'batch["target"]).square', "in loss: KeyError: 'target'"),
        ("Data(split", "Dato(split", "in data: NameError"),
    ],
)
def test_an_error_in_the_users_own_code_says_where(run: RunDir, line: str, broken: str, message: str) -> None:
    (run.path / "task.py").write_text(TASK.replace(line, broken))
    done = train(run, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
