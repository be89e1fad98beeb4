"""The parent of a killed coordinator starts it again: no step is lost, and every signal arrives once."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cuadrilla.monitor.run import state_of
from cuadrilla.rundir import RunDir, last_rows
from tests.commands import (
    COMMAND,
    coordinator,
    ended,
    events,
    is_what_one_worker_gives,
    make_run,
    reached,
    start,
    train,
    wait_for,
)
from tests.machines import Machines
from tests.terminal import OWN_TERMINAL

STRICT = ("--set", "sync.strict=true")
CREW = (*STRICT, "--practice", "0.5,0.25")
WRITES = "import sys; open(sys.argv[1], 'a', encoding='utf-8').write(sys.stdin.read() + '\\n')"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "cuadrilla ñ")


@pytest.fixture
def crew(run: RunDir) -> Iterator["subprocess.Popen[str]"]:
    process = start(run, *CREW)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def num_restarts(run: RunDir) -> int:
    return len(events(run, "coordinator restarted"))


def versions(run: RunDir) -> list[int]:
    return [row["version"] for row in last_rows(run.metrics)]


def test_killed_while_training_and_while_coming_back_and_left_at_once(
    crew: "subprocess.Popen[str]", run: RunDir
) -> None:
    """The second coordinator is killed before any worker has joined it. The third one is frozen when two signals come,
    and stays frozen."""
    wait_for(reached(run, 10), crew)
    coordinator(crew).kill()
    wait_for(lambda: num_restarts(run) == 1, crew)
    before = events(run, "joined")
    wait_for(lambda: bool(psutil.Process(crew.pid).children()), crew)
    announced = max(versions(run))
    coordinator(crew).kill()
    wait_for(lambda: num_restarts(run) == 2, crew)
    assert (events(run, "joined"), max(versions(run))) == (before, announced)
    wait_for(reached(run, announced + 5), crew)
    everybody = psutil.Process(crew.pid).children(recursive=True)
    child = frozen(coordinator(crew))
    crew.send_signal(signal.SIGINT)
    wait_for(lambda: signal.SIGINT in pending(child.pid), crew)
    crew.send_signal(signal.SIGTERM)
    said = ended(crew, code=130)
    assert "and saved" not in said
    assert json.loads(run.status.read_text())["state"] == "running"
    assert len(psutil.wait_procs(everybody, timeout=30)[0]) == 3
    assert said.count("the coordinator was killed (SIGKILL); it restarts") == 2
    assert int(said.split("resumed    at step ")[-1].split()[0]) >= announced
    train(run, *STRICT, "--stop-at", str(max(versions(run)) + 5), code=0)
    assert is_what_one_worker_gives(run, *STRICT)


@pytest.mark.thorough
def test_stopped_while_it_comes_back_it_stays_away(crew: "subprocess.Popen[str]", run: RunDir) -> None:
    """A coordinator that was asked to stop, and is killed before it has, is not started again."""
    wait_for(reached(run, 10), crew)
    child = frozen(coordinator(crew))
    crew.send_signal(signal.SIGTERM)
    wait_for(lambda: signal.SIGTERM in pending(child.pid), crew)
    child.kill()
    ended(crew, code=128 + signal.SIGKILL)
    assert num_restarts(run) == 0


@pytest.mark.thorough
def test_one_that_dies_again_and_again_is_told(run: RunDir) -> None:
    """The parent sends the alarm, by the settings with which the run was started."""
    told = run.path / "told"
    alarm = ("--set", f"alarm.command={json.dumps([sys.executable, '-c', WRITES, str(told)])}")
    assert train(run, *alarm, "--stop-at", "1").returncode == 0
    told.unlink(missing_ok=True)
    (run.path / "task.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGSEGV)})")
    crew = start(run, "--practice", "0.5,0.25", *alarm)
    said = ended(crew, code=3)
    assert num_restarts(run) == 2
    assert "the coordinator died 3 times without a step in between (the last time by SIGSEGV)" in said
    assert "hint:" in said
    assert "Traceback" not in said
    (row,) = map(json.loads, told.read_text().splitlines())
    assert (row["event"], state_of(run)) == ("failed", "failed")
    assert "died 3 times without a step in between" in row["text"]


@pytest.mark.thorough
def test_a_terminal_that_is_closed_ends_a_coordinator_that_has_saved(machine: Machines, run: RunDir) -> None:
    """The kernel sends SIGHUP to the process in the foreground, and later writes to the terminal fail."""
    terminal, theirs = pty.openpty()
    command = [*COMMAND, "up", str(run.path), "--listen", "127.0.0.1:0", *STRICT, "--set", "engine.workers=[1.0]"]
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *command], env=machine("coordinator").environment(),
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(terminal, False)
    wait_for(lambda: read_all(terminal) and reached(run, 5)(), process)
    everybody = psutil.Process(process.pid).children(recursive=True)
    os.close(terminal)
    assert process.wait(timeout=150) == 130
    assert json.loads(run.status.read_text())["state"] == "stopped"
    assert num_restarts(run) == 0
    assert len(psutil.wait_procs(everybody, timeout=30)[0]) == 2
    assert is_what_one_worker_gives(run, *STRICT)


def read_all(terminal: int) -> bool:
    """Read what has been written so far, else the writers would block."""
    with contextlib.suppress(BlockingIOError):
        while os.read(terminal, 2**16):
            pass
    return True


def frozen(process: psutil.Process) -> psutil.Process:
    """Stop a process and wait until it is stopped, since a signal with a lower number would overtake SIGSTOP."""
    process.suspend()
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
    return process


def pending(pid: int) -> set[int]:
    """Signals that a stopped process has not received yet."""
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    bits = int(lines["ShdPnd"], 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}
