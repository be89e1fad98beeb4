"""`cuadrilla monitor` on a coordinator's machine: the machines that have joined, and what each does for a run."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.home import Home
from cuadrilla.link.nodes import AllowList
from cuadrilla.rundir import FolderLock, RunDir, append_event, make_private, write_json
from tests.commands import run_program
from tests.inside import cuadrilla
from tests.watched import WrittenCrew


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    make_private(home.crew)
    return home


def environment(home: Home, **more: str) -> dict[str, str]:
    return {**os.environ, "CUADRILLA_HOME": str(home.path), **more}


def test_the_crew_of_a_run(home: Home, tmp_path: Path) -> None:
    """Two machines are present and one has not come. Later no run is trained, and the machines are still listed."""
    for name in ("ana", "luis", "eva"):
        AllowList(home.nodes).add(name)
    run = WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 1.0, "luis": 1.0}, rounds=5, state="running").write()
    write_json(home.open_file, {"address": "127.0.0.1:1", "run": str(run.path)})
    with FolderLock(run.lock):
        told = monitored(environment(home))
        assert (told["nodes"], told["crew"]["version"]) == (["ana", "eva", "luis"], 5)
        machines = [(each["name"], each["here"], each["phase"], each["share"]) for each in told["crew"]["machines"]]
        assert machines == [("ana", True, None, 0.5), ("luis", True, None, 0.5), ("eva", False, None, None)]
        lines = cuadrilla("monitor", "--once", env=environment(home)).stdout.splitlines()
        assert [line.split()[:2] for line in lines[-3:]] == [["ana", "-"], ["luis", "-"], ["eva", "gone"]]
    assert "crew" not in monitored(environment(home))
    done = cuadrilla("monitor", "--once", env=environment(home))
    assert done.stdout.splitlines()[-1] == "machines of this crew: ana, eva, luis"


def monitored(environment: Mapping[str, str]) -> dict[str, Any]:
    done = cuadrilla("monitor", "--once", "--json", env=environment, code=0)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_it_needs_no_torch(home: Home, tmp_path: Path) -> None:
    """Also on a machine that hands out runs of a queue."""
    folder = RunDir(tmp_path / "queue.crew")
    make_private(folder.path)
    append_event(folder.events, "joined", worker="ana")
    write_json(home.open_file, {"address": "127.0.0.1:1", "run": str(folder.path)})
    code = (
        "import sys; from cuadrilla.cli.app import run; code = run()\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy', 'fastapi', 'grpc')))"
    )
    with FolderLock(folder.lock):
        done = run_program(sys.executable, "-c", code, "monitor", "--once", env=environment(home))
    assert "queue.crew  running  workers: 1" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("ana")
