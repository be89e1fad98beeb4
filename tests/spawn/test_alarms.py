"""Alarms of a crew of processes: a worker that is killed, Ctrl-C, a coordinator that dies again and again."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cuadrilla.monitor.run import state_of
from cuadrilla.rundir import RunDir
from tests.commands import coordinator, events, goes_on, joined, make_run, start, stop, wait_for

WRITES = "import sys; open(sys.argv[1], 'a', encoding='utf-8').write(sys.stdin.read() + '\\n')"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "casa")


def told(run: RunDir) -> list[list[str]]:
    file = run.path / "told"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [[row["event"], row["text"]] for row in rows]


def crew_of(run: RunDir) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITES, str(run.path / "told")]
    return start(run, "--practice", "0.5,0.25", "--set", f"alarm.command={json.dumps(command)}")


def a_worker(crew: "subprocess.Popen[str]") -> psutil.Process:
    return next(
        process for process in coordinator(crew).children(recursive=True) if "worker-2" in " ".join(process.cmdline())
    )


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_crew_tells(run: RunDir) -> None:
    crew = crew_of(run)
    wait_for(joined(run, 2), crew)
    wait_for(goes_on(run, steps=1), crew)
    a_worker(crew).kill()
    wait_for(lambda: "left" in [event for event, _ in told(run)], crew)
    stop(crew)
    heard = told(run)  # on a busy machine the worker was late first
    assert next(text for event, text in heard if event == "left").startswith("worker-2 has left: ")
    assert heard[-1][0] == "stopped"
    (run.path / "told").unlink()
    (run.path / "task.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGSEGV)})")
    again = crew_of(run)
    said = again.communicate(timeout=150)[1]
    assert again.returncode == 3, said
    assert len(events(run, "coordinator restarted")) == 2
    assert "the coordinator died 3 times without a step in between (the last time by SIGSEGV)" in said
    assert "hint:" in said
    assert "Traceback" not in said
    assert ([event for event, _ in told(run)], state_of(run)) == (["failed"], "failed")
    assert "died 3 times without a step in between" in told(run)[0][1]
