"""A crew of real processes over the crew link is killed, frozen, interrupted and resumed; its weights stay the same."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import (
    COMMAND,
    TASK,
    begin,
    coordinator,
    ended,
    events,
    is_what_one_worker_gives,
    make_run,
    newest_version,
    reached,
    run_program,
    start,
    train,
    wait_for,
)

STRICT = ("--set", "sync.strict=true")
PRACTICE = ("--practice", "0.5,0.25,0.1@1gbit+1ms")
PROVEN = ("--crew", "1.0,0.5", "--steps", "6", "--set", "train.steps=1000")
OTHER_MODEL_IN_A_CREW = TASK.replace(
    ".square().sum()", '.square().sum() * (1.0 + 1e-6 * ("work" in __import__("sys").argv))'
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "cuadrilla ñ")


def goes_on_alone(run: RunDir) -> bool:
    """The same command without a crew resumes the run, and reaches the weights of one worker."""
    steps = last_rows(run.metrics)[-1]["version"] + 5
    train(run, *STRICT, "--stop-at", str(steps), code=0)
    return is_what_one_worker_gives(run, *STRICT)


@pytest.mark.thorough
def test_a_killed_parent_takes_everybody_with_it_and_no_step_is_lost(run: RunDir) -> None:
    """A crew with another number of workers resumes the run. It ends when all are killed, and can be resumed again."""
    crew = start(run, *STRICT, *PRACTICE)
    wait_for(reached(run, 20), crew)
    everybody = psutil.Process(crew.pid).children(recursive=True)
    crew.kill()
    crew.communicate()
    announced = newest_version(run)
    gone, alive = psutil.wait_procs(everybody, timeout=30)
    assert len(gone) == 4, alive  # the coordinator and three workers
    crew = start(run, *STRICT, "--practice", "1.0,1.0")
    wait_for(reached(run, announced + 20), crew)
    for child in coordinator(crew).children():
        child.kill()
    said = ended(crew, code=3)
    assert int(said.split("resumed    at step ")[1].split()[0]) >= announced
    assert "all worker processes were killed" in said
    assert [row["reason"] for row in events(run, "failed")] == ["all worker processes were killed"]
    assert goes_on_alone(run)


@pytest.mark.thorough
def test_ctrl_c_reaches_the_whole_terminal_and_nobody_stays(run: RunDir) -> None:
    crew = begin("train", run.path, *STRICT, *PRACTICE, start_new_session=True)
    wait_for(reached(run, 10), crew)
    workers = coordinator(crew).children()
    os.killpg(crew.pid, signal.SIGINT)
    said = ended(crew, code=130)
    assert "Traceback" not in said
    assert "and saved; the same command continues" in said  # each signal once: a second one would leave at once
    assert json.loads(run.status.read_text())["state"] == "stopped"
    assert not events(run, "failed") + events(run, "coordinator restarted")
    assert len(psutil.wait_procs(workers, timeout=30)[0]) == 3
    assert goes_on_alone(run)


# -- `cuadrilla prove`: with equal and with different bits; it leaves nothing behind -----------------------------------


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def prove(run: RunDir, temporary: Path, *arguments: str, code: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return run_program(*COMMAND, "prove", run.path, *arguments, env=environment, code=code)


def untouched(run: RunDir, temporary: Path) -> bool:
    left = [path.name for path in temporary.iterdir() if path.name.startswith("cuadrilla")]
    kept = {path.name for path in run.path.iterdir()} - {"__pycache__"}
    return not left and kept == {"run.toml", "task.py"}


def test_the_same_bits(run: RunDir, temporary: Path) -> None:
    done = prove(run, temporary, *PROVEN, "--json", code=0)
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout)
    assert result["equal"]
    assert len(result["sha256"]) == 64
    assert untouched(run, temporary)


@pytest.mark.thorough
def test_other_bits_are_told(run: RunDir, temporary: Path) -> None:
    """In worker processes the loss of the model is a millionth larger."""
    (run.path / "task.py").write_text(OTHER_MODEL_IN_A_CREW)
    done = prove(run, temporary, *PROVEN, code=7)
    assert "the crew's bits are not those of one worker: " in done.stderr
    assert "hint:" in done.stderr
    assert "Equal" not in done.stdout
    assert untouched(run, temporary)
