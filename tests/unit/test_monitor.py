"""`cuadrilla monitor`, one sample: of this machine, of a run, as lines, as JSON, into a file."""

import json
import re
from pathlib import Path

import pytest

from cuadrilla.host.usage import Usage
from cuadrilla.link.base import NodeReport
from cuadrilla.rundir import RunDir, write_json
from cuadrilla.train.nodelog import NodeLogs
from tests.inside import cuadrilla
from tests.watched import add_rows


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "mio")
    run.path.mkdir()
    run.run_file.write_text("schema = 1\n")
    hostile = "\x1b]0;owned\x07"
    add_rows(run.events, [{"time": 1.8e9, "event": "joined", "worker": hostile}])
    add_rows(run.metrics, [{"version": 7, "tokens": 70, "loss": 2.5, "tokens_per_second": 9.0, "shares": {hostile: 1}}])
    NodeLogs(run.nodes).report("coordinator", NodeReport(usage=Usage(cpu_percent=5.0), phase="computing"))
    write_json(run.status, {"state": "complete"})
    return run


def test_this_machine_once(tmp_path: Path) -> None:
    done = cuadrilla("monitor", "--once", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("CPU ")
    assert "\x1b" not in done.stdout
    (line,) = cuadrilla("monitor", "--once", "--json", cwd=tmp_path).stdout.splitlines()
    told = json.loads(line)
    assert set(told) == {"time", "machine", "processor", "gpus_silent", *Usage.__dataclass_fields__}
    assert 0 <= told["cpu_percent"] <= 100
    assert told["disk_bytes"] > 0


@pytest.mark.parametrize("named", ["", "run.toml"])
def test_a_run_once(run: RunDir, named: str) -> None:
    done = cuadrilla("monitor", run.path / named, "--once")
    assert done.returncode == 0, done.stderr
    head, _, coordinator, hostile = done.stdout.splitlines()
    assert "mio  complete  step 7  loss 2.500" in head
    assert coordinator.split()[:3] == ["coordinator", "last", "seen"]
    assert re.match(r"\\u001b\]0;owned\\u0007 +last seen +100 %", hostile)
    assert "\x1b" not in done.stdout


def test_a_run_as_json(run: RunDir) -> None:
    told = json.loads(cuadrilla("monitor", run.path, "--once", "--json").stdout)
    assert (told["state"], told["version"], told["loss"]) == ("complete", 7, 2.5)
    coordinator, other = told["machines"]
    assert coordinator["usage"]["cpu_percent"] == 5.0
    assert (coordinator["here"], coordinator["phase"], other["share"]) == (False, None, 1.0)


def test_what_is_no_run(tmp_path: Path) -> None:
    missing = cuadrilla("monitor", tmp_path / "nothing", "--once")
    assert missing.returncode == 2
    assert "is no run" in missing.stderr
