"""Machines stay paused through restarts and stops of their crew."""

import pytest

from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import coordinator as coordinating
from tests.commands import events, goes_on, is_what_one_worker_gives, wait_for
from tests.machines import Machines, down, invite, present, up

pytestmark = pytest.mark.thorough


def times_joined(run: RunDir, worker: str) -> int:
    return [row["worker"] for row in events(run, "joined")].count(worker)


def phase(run: RunDir, worker: str) -> str:
    """The worker's phase in its newest row."""
    path = run.nodes / f"{worker}.jsonl"
    rows = [row for row in read_jsonl(path) if row["kind"] == "usage"] if path.exists() else []
    return str(rows[-1].get("phase", "")) if rows else ""


def test_a_pause_outlives_the_coordinator(machine: Machines, run: RunDir, port: int) -> None:
    """The coordinator is killed and comes back. Then it is stopped and started again; the paused node still waits.

    The last worker is paused, too, while a checkpoint is written at each step. The run waits, and then goes on.
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
    assert workers[0].poll() is None  # it keeps calling: the crew may go on, and then it waits again
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
