"""`[alarm]` with real programs: alarms come in time and never delay the run."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from cuadrilla.config import AlarmSection
from cuadrilla.crew.bundle import offer
from cuadrilla.errors import DataError
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_config
from cuadrilla.train.alarms import Alarms
from tests.commands import wait_for
from tests.conftest import children
from tests.inside import cuadrilla
from tests.runs import newest

WRITES = "import sys; open(sys.argv[1], 'a', encoding='utf-8').write(sys.stdin.read() + '\\n')"
HANGS_AT_FIRST = """
import json, pathlib, sys, time
event = json.load(sys.stdin)["event"]
if event == "left":
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
pathlib.Path(sys.argv[2]).write_text(event)
"""


def writer(file: Path) -> list[str]:
    return [sys.executable, "-c", WRITES, str(file)]


def told(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_in(folder: Path) -> RunDir:
    (folder / "casa").mkdir()
    return RunDir(folder / "casa")


def test_a_program_is_told_once_of_what_happens_a_thousand_times(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    with Alarms(AlarmSection(command=writer(file)), run=run) as alarms:
        alarms.on_event("joined", {"worker": "ana"})
        for number in range(1000):
            alarms.on_event("left", {"worker": f"w{number}", "reason": "it was\nswitched off {title}"})
        alarms.on_event("alarm", {"message": "the disk is full"})
        wait_for(lambda: bool(told(file)))
        alarms.on_event("finished", {"version": 12, "complete": True, "reason": ""})
        alarms.on_event("left", {"worker": "berta", "reason": "the run is over"})
    left, alarm, finished = told(file)
    assert (left["event"], finished["event"], left["title"]) == ("left", "finished", "cuadrilla: casa")
    assert (left["text"], left["run"]) == ("w0 has left: it was\\nswitched off {title}", "casa")
    assert (alarm["text"], finished["text"]) == ("the disk is full", "all 12 steps are done")
    assert finished["time"].endswith("+00:00")


def test_a_failure_is_told_with_its_reason(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    with pytest.raises(DataError), Alarms(AlarmSection(command=writer(file)), run=run):
        raise DataError("{path} is gone", path="x.bin")
    assert [each["text"] for each in told(file)] == ["it has failed: x.bin is gone"]


def test_what_hangs_is_killed_and_the_last_word_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cuadrilla.train.alarms.LIMIT_SECONDS", 3.0)
    run, file, last = run_in(tmp_path), tmp_path / "started", tmp_path / "told"
    command = [sys.executable, "-c", HANGS_AT_FIRST, str(file), str(last)]
    with Alarms(AlarmSection(command=command), run=run) as alarms:
        alarms.on_event("left", {"worker": "w", "reason": ""})
        wait_for(file.exists)
        alarms.on_event("finished", {"version": 1, "complete": True, "reason": ""})
    assert last.read_text() == "finished"
    assert not children()
    assert caplog.text.count("alarm.command did not start, or did not end well in 3 s") == 1


def test_what_cannot_be_sent_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Alarms(AlarmSection(command=["no-such-program"]), run=run_in(tmp_path)) as alarms:
        alarms.on_event("finished", {"version": 1, "complete": True, "reason": ""})
    assert "alarm.command did not start" in caplog.text


def test_a_run_tells_and_nobody_else_holds_the_section(language: RunDir, tmp_path: Path) -> None:
    """Neither the checkpoint, which a standby copies, nor the offer to workers. A run may resume with other alarms."""
    file, trained = tmp_path / "told", RunDir(shutil.copytree(language.path.parent, tmp_path / "made") / "run")
    command = f"alarm.command={json.dumps(writer(file))}"
    cuadrilla("train", trained.path, "--set", "train.steps=5", "--allow-changes", "--set", command, code=0)
    assert [each["text"] for each in told(file)] == ["all 5 steps are done"]
    config = read_run_config(trained)
    assert config.alarm.command
    assert newest(trained.path).state["identity"]["config"]["alarm"]["command"] == []
    assert json.loads(offer(config, trained.path).config)["alarm"]["command"] == []
    done = cuadrilla("train", trained.path, "--set", "train.steps=5", "--set", 'alarm.command="gone"', code=0)
    assert "alarm.command did not start" in done.stderr
