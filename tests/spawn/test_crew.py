"""A crew of real processes over the crew link: killed, frozen, interrupted, resumed; the weights stay the same."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import (
    coordinator,
    events,
    goes_on,
    is_what_one_worker_gives,
    joined,
    make_run,
    newest_version,
    reached,
    start,
    stop,
    train,
    wait_for,
)

STRICT = ("--set", "sync.strict=true")
PRACTICE = ("--practice", "0.5,0.25,0.1@1gbit+1ms")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "cuadrilla ñ")


@pytest.fixture
def crew(run: RunDir) -> Iterator["subprocess.Popen[str]"]:
    """Three unequal worker processes that train `run` in strict mode."""
    process = start(run, *STRICT, *PRACTICE)
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


def worker(crew: "subprocess.Popen[str]", name: str) -> psutil.Process:
    """The process of a worker, by the name among its arguments."""
    found = [child for child in coordinator(crew).children() if name in child.cmdline()]
    assert len(found) == 1
    return found[0]


def goes_on_alone(run: RunDir) -> bool:
    """The same command without the crew resumes, and ends up where one worker would have been."""
    steps = last_rows(run.metrics)[-1]["version"] + 5
    done = train(run, *STRICT, "--stop-at", str(steps))
    assert done.returncode == 0, done.stderr
    return is_what_one_worker_gives(run, *STRICT)


def test_a_killed_worker_changes_nothing(crew: "subprocess.Popen[str]", run: RunDir) -> None:
    wait_for(joined(run, 3), crew)
    arguments = " ".join(" ".join(child.cmdline()) for child in coordinator(crew).children())
    assert "PRIVATE" not in arguments
    assert "cuadrilla1." not in arguments
    wait_for(goes_on(run), crew)
    worker(crew, "worker-1").kill()
    wait_for(lambda: bool(events(run, "left")), crew)
    wait_for(goes_on(run), crew)
    assert "worker-1 died: signal 9" in stop(crew)
    assert is_what_one_worker_gives(run, *STRICT)
    assert [row["worker"] for row in events(run, "left")] == ["worker-1"]


@pytest.mark.thorough
def test_strict_windows_survive_a_killed_worker_and_a_killed_coordinator(run: RunDir) -> None:
    """Weights and optimizer state are those of record, and a lane is the same whoever computes it: the bits stay."""
    windows = ("--set", "sync.kind=windows", "--set", "sync.steps=4", "--set", "sync.lanes=[1.0, 0.5, 0.25]", *STRICT)
    crew = start(run, *windows, *PRACTICE)
    wait_for(joined(run, 3), crew)
    wait_for(goes_on(run), crew)
    worker(crew, "worker-1").kill()
    wait_for(lambda: bool(events(run, "left")), crew)
    wait_for(goes_on(run), crew)
    coordinator(crew).kill()
    wait_for(goes_on(run, steps=80), crew)
    stop(crew)
    rows = last_rows(run.metrics)
    assert [row["version"] for row in rows] == list(range(4, 4 * len(rows) + 1, 4))
    assert rows[-1]["tokens"] == len(rows) * 4 * 64
    assert sum(row["loss"] for row in rows[-5:]) < sum(row["loss"] for row in rows[:5])
    assert is_what_one_worker_gives(run, *windows)


@pytest.mark.thorough
def test_a_killed_parent_takes_everybody_with_it_and_no_step_is_lost(run: RunDir) -> None:
    crew = start(run, *STRICT, *PRACTICE)
    wait_for(reached(run, 20), crew)
    everybody = psutil.Process(crew.pid).children(recursive=True)
    crew.kill()
    crew.communicate()
    announced = newest_version(run)
    gone, alive = psutil.wait_procs(everybody, timeout=30)
    assert len(gone) == 4, alive  # the coordinator and three workers
    other = ("--practice", "1.0,1.0", "--stop-at", str(announced + 20))  # another number of workers
    done = train(run, *STRICT, *other)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split("resumed    at step ")[1].split()[0]) >= announced
    assert is_what_one_worker_gives(run, *STRICT)


@pytest.mark.thorough
def test_without_workers_the_run_ends_and_can_go_on(crew: "subprocess.Popen[str]", run: RunDir) -> None:
    wait_for(reached(run, 10), crew)
    for child in coordinator(crew).children():
        child.kill()
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 3, said
    assert "all worker processes were killed" in said
    assert [row["reason"] for row in events(run, "failed")] == ["all worker processes were killed"]
    assert goes_on_alone(run)


@pytest.mark.thorough
def test_ctrl_c_reaches_the_whole_terminal_and_nobody_stays(run: RunDir) -> None:
    crew = start(
        run, *STRICT, *PRACTICE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_for(reached(run, 10), crew)
    workers = coordinator(crew).children()
    os.killpg(crew.pid, signal.SIGINT)
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 130, said
    assert "Traceback" not in said
    assert "and saved; the same command continues" in said  # each signal once: a second one would leave at once
    assert json.loads(run.status.read_text())["state"] == "stopped"
    assert not events(run, "failed") + events(run, "coordinator restarted")
    assert len(psutil.wait_procs(workers, timeout=30)[0]) == 3
    assert goes_on_alone(run)


@pytest.mark.parametrize(
    ("practice", "message"),
    [("fast", "is not a list of speeds"), ("1.0,", "is not a list of speeds"), ("0", "engine.workers"),
     ("1@100", "engine.link"), ("1@100mbit-2ms", "engine.link")],
)  # fmt: skip
def test_wrong_practice(run: RunDir, practice: str, message: str) -> None:
    done = train(run, "--practice", practice)
    assert done.returncode == 2
    assert message in done.stderr
