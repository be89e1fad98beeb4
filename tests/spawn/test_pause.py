"""Machines that are told to wait, while all kinds of things happen to the crew that they belong to."""

from collections.abc import Callable

import pytest

from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import coordinator as coordinating
from tests.commands import events, goes_on, is_what_one_worker_gives, wait_for
from tests.machines import Machine, down, invite, present, up

pytestmark = pytest.mark.thorough


def times_joined(run: RunDir, worker: str) -> int:
    return [row["worker"] for row in events(run, "joined")].count(worker)


def phase(run: RunDir, worker: str) -> str:
    """What the newest row says that it does."""
    path = run.nodes / f"{worker}.jsonl"
    rows = [row for row in read_jsonl(path) if row["kind"] == "usage"] if path.exists() else []
    return str(rows[-1].get("phase", "")) if rows else ""


def test_a_pause_outlives_the_coordinator(machine: Callable[[str], Machine], run: RunDir, port: int) -> None:
    """It is killed and comes back; then it is told to end while a node waits, and begun anew: the node waits on.

    The last worker is paused as well, while checkpoints are written, one at each step: the run waits, and goes on.
    """
    coordinator, ana, luis = machine("coordinator"), machine("ana"), machine("luis")
    crew = up(coordinator, run, port, "--set", "checkpoint.every_steps=1")
    text = invite(coordinator, "--uses", "2")
    workers = [each.start("join", "--name", name, says=text) for each, name in ((ana, "ana"), (luis, "luis"))]
    wait_for(lambda: present(run) == {"ana", "luis"}, crew)
    assert ana.run("pause").returncode == 0
    wait_for(lambda: present(run) == {"luis"}, crew)
    wait_for(lambda: phase(run, "ana") == "paused", crew)
    for number in (2, 3):
        wait_for(goes_on(run, steps=2), crew)
        assert luis.run("pause").returncode == 0
        wait_for(lambda: present(run) == set(), crew)
        assert luis.run("pause", "--off").returncode == 0
        wait_for(lambda number=number: times_joined(run, "luis") == number, crew)  # type: ignore[misc]
    coordinating(crew).kill()
    wait_for(lambda: times_joined(run, "luis") == 4, crew)
    wait_for(goes_on(run), crew)
    assert times_joined(run, "ana") == 1
    down(coordinator, crew)
    assert workers[1].wait(timeout=150) == 0
    assert workers[0].poll() is None  # it asks on: the same crew may go on, and then it waits again
    crew = up(coordinator, run, port)
    again = luis.start("join")
    wait_for(lambda: times_joined(run, "luis") == 5, crew)
    wait_for(goes_on(run), crew)
    assert times_joined(run, "ana") == 1
    assert ana.run("pause", "--off").returncode == 0
    wait_for(lambda: times_joined(run, "ana") == 2, crew)
    wait_for(lambda: phase(run, "ana") not in ("", "paused"), crew)
    down(coordinator, crew)
    assert [workers[0].wait(timeout=150), again.wait(timeout=150)] == [0, 0]
    assert is_what_one_worker_gives(run)
