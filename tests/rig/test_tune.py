"""A search over three machines of a network, two of which die in the middle of trials: nothing of it changes."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.lan import Member, lan
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, read_object
from cuadrilla.tune.folder import JOBS
from tests.commands import wait_for
from tests.machines import LANGUAGE_RUN, Machine, invite
from tests.networks import need_namespaces
from tests.spawn.test_tune import results

PORT = 47471
STEPS = 160
TUNE = """every_steps = 20
[tune]
sampler = "random"
trials = 4
seed = 3
[tune.space]
optim.lr = {low = 0.0001, high = 0.1, log = true}
model.width = {choices = [16, 32]}
"""


@pytest.fixture
def network() -> Iterator[list[Member]]:
    need_namespaces()
    with lan(3, rate="400mbit") as members:
        yield members


def make_search(folder: Path, data: Path) -> Path:
    folder.mkdir()
    (folder / "data").symlink_to(data)
    (folder / "run.toml").write_text(LANGUAGE_RUN.format(steps=STEPS) + TUNE)
    return folder


def rows(folder: Path, state: str, place: str = "") -> list[dict[str, Any]]:
    found = read_object(folder / "tune" / JOBS).get("jobs", [])
    return [row for row in found if row["state"] == state and row["machine"].startswith(place)]


def amid(folder: Path, place: str) -> Any:
    """Whether a place is in the middle of a trial, of which something has come back."""

    def holds() -> bool:
        running = [RunDir(folder / "tune" / row["name"]) for row in rows(folder, "running", place)]
        return any(int(path.name[1:]) >= 20 for run in running for path in run.checkpoints.glob("v*"))

    return holds


def children(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_search_over_machines_that_are_killed_is_the_same(
    network: list[Member], machines: list[Machine], stories: Path, tmp_path: Path
) -> None:
    """One machine is killed in a trial, then the coordinator; each comes back."""
    undisturbed, folder = (make_search(tmp_path / name, stories) for name in ("undisturbed", "search"))
    coordinator, ana, luis = machines
    for machine in machines:
        machine.talk = tmp_path / f"{machine.address}.txt"
    alone = luis.start("tune", str(undisturbed))
    command = ("tune", str(folder), "--crew", "--listen", f"{coordinator.address}:{PORT}", "--uses", "2")
    search = coordinator.start(*command)
    wait_for(lambda: Home(coordinator.home).open_file.exists(), search)
    text = invite(coordinator, "--uses", "2")
    working = {
        name: machine.start("join", "--name", name, says=text) for name, machine in (("ana", ana), ("luis", luis))
    }

    wait_for(amid(folder, "ana"), search, every_seconds=0.1)
    left_behind = children(working["ana"])
    working["ana"].kill()
    wait_for(lambda: not any(child.is_running() for child in left_behind))
    working["ana"] = ana.start("join")
    wait_for(lambda: len(rows(folder, "complete")) >= 2, search, every_seconds=0.1)
    before = results(folder)
    search.kill()
    search.wait()
    Home(coordinator.home).open_file.unlink()
    search = coordinator.start(*command)

    assert search.wait(timeout=200) == 0, coordinator.talk.read_text() if coordinator.talk else ""
    found = results(folder)
    assert alone.wait(timeout=200) == 0
    assert found == results(undisturbed)
    assert before.keys() == before.keys() & found.keys()
    assert rows(folder, "complete", "ana")
    assert rows(folder, "complete", "luis")
    for process in working.values():
        assert process.wait(timeout=60) == 0
    assert not list(Home(ana.home).jobs.glob("*/*/t*"))
    assert list((folder / "tune").glob("t*/checkpoints/v*")), "the weights of the best have come back"
