"""`cuadrilla monitor` and `cuadrilla nodes` on a machine that hands out a queue: what each machine of its crew has."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.home import Home
from cuadrilla.host.usage import Usage
from cuadrilla.jobs.queue import RunQueue
from cuadrilla.link.base import NodeReport
from cuadrilla.rundir import FolderLock, RunDir, append_event, make_private, write_json
from cuadrilla.train.nodelog import NodeLogs
from tests.commands import wait_for
from tests.inside import cuadrilla
from tests.machines import Machine, invite, language_run
from tests.terminal import Terminal
from tests.watched import WrittenCrew

NAME = "\x1b[2J dos"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """Hands out two runs: Ana has one, this machine the other, whose name would act on a terminal."""
    home = Home(tmp_path / "home")
    queue = RunQueue(home.queue)
    for name, place in (("uno", "ana"), (NAME, "place-1")):
        run = WrittenCrew(folder=tmp_path / name, speeds={"x": 1.0}, rounds=5).write()
        queue.note(queue.add(run), "running", place=place)
    append_event(home.queue / "events.jsonl", "joined", worker="ana")
    NodeLogs(home.queue / "nodes").report("ana", NodeReport(usage=Usage(cpu_percent=50.0), phase="computing"))
    make_private(home.crew)
    write_json(home.open_file, {"address": "127.0.0.1:1", "run": str(home.queue)})
    with FolderLock(home.queue / "lock", purpose="a test"):
        yield home


def environment(home: Home, **more: str) -> dict[str, str]:
    return {**os.environ, "CUADRILLA_HOME": str(home.path), **more}


def test_who_has_what(home: Home) -> None:
    """Once nobody hands out any more, this machine is shown alone."""
    told = monitored(environment(home))["hands_out"]
    assert (told["kind"], told["state"]) == ("queue", "running")
    assert [(job["machine"], job["state"], job["step"]) for job in told["jobs"]] == [
        ("ana", "running", 5),
        ("place-1", "running", 5),
    ]
    assert [machine["name"] for machine in told["machines"]] == ["ana", "place-1"]
    assert told["machines"][0]["jobs"] == ["uno"]
    assert told["machines"][0]["usage"]["cpu_percent"] == 50
    (home.queue / "lock").unlink()
    assert "hands_out" not in monitored(environment(home))


def monitored(environment: Mapping[str, str]) -> dict[str, Any]:
    done = cuadrilla("monitor", "--once", "--json", env=environment)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_at_a_terminal(home: Home, tmp_path: Path) -> None:
    terminal = Terminal(
        ["monitor", "--interval", "0.1"], cwd=tmp_path, LC_ALL="C.UTF-8", LANGUAGE="es", CUADRILLA_HOME=str(home.path)
    )
    try:
        wait_for(terminal.shows(r"cola +en marcha +han acabado: 0 de 2 +máquinas: 2"), terminal.process)
        wait_for(terminal.shows(r"ana +uno 5 +calcula"), terminal.process)
        wait_for(terminal.shows(r"place-1 +\\u001b\[2J dos 5"), terminal.process)
    finally:
        terminal.close()


def test_it_needs_no_torch(home: Home) -> None:
    code = (
        "import sys; from cuadrilla.cli.app import run; code = run()\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy', 'fastapi', 'grpc')))"
    )
    command = [sys.executable, "-c", code, "monitor", "--once"]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "place-1" in done.stdout


@pytest.mark.thorough
def test_a_real_queue(stories: Path, tmp_path: Path) -> None:
    """And the machine after it has gone."""
    coordinator = Machine(tmp_path / "coordinator", talk=tmp_path / "coordinator.txt")
    ana = Machine(tmp_path / "ana", talk=tmp_path / "ana.txt")
    run: RunDir = language_run(tmp_path / "uno", stories)
    try:
        assert coordinator.run("queue", "add", str(run.path)).returncode == 0
        process = coordinator.start("queue", "work", "--listen", "127.0.0.1:0", "--not-here", "--until-empty")
        wait_for(lambda: Home(coordinator.home).open_file.exists(), process)
        working = ana.start("join", "--name", "ana", says=invite(coordinator))
        here = environment(Home(coordinator.home))
        wait_for(lambda: [each["jobs"] for each in machines_of(here)] == [["uno"]], working, every_seconds=0.2)
        (row,) = json.loads(coordinator.run("nodes", "--json").stdout)
        assert (row["node"], row["share"], row["job"].split()[0]) == ("ana", None, "uno")
        talk = coordinator.run("nodes")
        assert "uno" in talk.stdout
        assert "share" not in talk.stderr
        assert coordinator.run("queue", "stop", "uno").returncode == 0
        assert process.wait(timeout=60) == 0
        assert machines_of(here) == []
    finally:
        ana.stop()
        coordinator.stop()


def machines_of(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = monitored(environment).get("hands_out", {}).get("machines", [])
    return found
