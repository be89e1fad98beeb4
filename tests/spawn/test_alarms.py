"""Alarms of a crew of processes: a coordinator that dies again and again."""

import json
import signal
import sys
from pathlib import Path

import pytest

from cuadrilla.monitor.run import state_of
from cuadrilla.rundir import RunDir
from tests.commands import events, make_run, start, train

WRITES = "import sys; open(sys.argv[1], 'a', encoding='utf-8').write(sys.stdin.read() + '\\n')"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "casa")


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_coordinator_that_dies_again_and_again_is_told(run: RunDir) -> None:
    """Its parent tells it, by the settings that the run was begun with."""
    alarm = ("--set", f"alarm.command={json.dumps([sys.executable, '-c', WRITES, str(run.path / 'told')])}")
    assert train(run, *alarm, "--stop-at", "1").returncode == 0
    (run.path / "told").unlink(missing_ok=True)
    (run.path / "task.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGSEGV)})")
    crew = start(run, "--practice", "0.5,0.25", *alarm)
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 3, said
    assert len(events(run, "coordinator restarted")) == 2
    assert "the coordinator died 3 times without a step in between (the last time by SIGSEGV)" in said
    assert "hint:" in said
    assert "Traceback" not in said
    (told,) = map(json.loads, (run.path / "told").read_text().splitlines())
    assert (told["event"], state_of(run)) == ("failed", "failed")
    assert "died 3 times without a step in between" in told["text"]
