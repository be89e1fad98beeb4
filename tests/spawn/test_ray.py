"""A crew on the user's Ray cluster: reservations, a killed worker, a killed coordinator, and nothing left behind."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.commands import coordinator as process_of
from tests.commands import ended, goes_on, is_what_one_worker_gives, joined, make_run, task_hash, wait_for
from tests.machines import Machine, down, invite, present, up
from tests.ray_cluster import RayNode

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"')

FREE = """
import ray, sys
ray.init(address="auto", log_to_driver=False)
for _ in sys.stdin:
    print(int(ray.available_resources().get("GPU", 0)), flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", unhurried=True)


@pytest.fixture
def crew(coordinator: Machine, run: RunDir, port: int) -> "subprocess.Popen[str]":
    """The coordinator of a strict run, which does not work itself."""
    return up(coordinator, run, port)


def start_workers(head: RayNode, coordinator: Machine, run: RunDir) -> "subprocess.Popen[str]":
    """The recipe, which approves the run's code by the beginning of its hash."""
    trust = task_hash(run.path)
    return head.start("ray_crew.py", "--trust", trust, "--name", "ray", says=invite(coordinator))


@pytest.fixture
def free_cards(head: RayNode) -> Iterator[Callable[[], int]]:
    """How many cards are not reserved, by a program of Ray that answers again and again, since its start is slow."""
    command = [*head.prefix, sys.executable, "-c", FREE]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        asked, answers = program.stdin, program.stdout
        assert asked is not None
        assert answers is not None

        def ask() -> int:
            print(file=asked, flush=True)
            return int(answers.readline())

        yield ask


def test_a_worker_reserves_all_cards_and_is_started_again_when_it_dies(
    head: RayNode, coordinator: Machine, run: RunDir, crew: "subprocess.Popen[str]", free_cards: Callable[[], int]
) -> None:
    recipe = start_workers(head, coordinator, run)
    wait_for(lambda: present(run) == {"ray"}, recipe)
    assert free_cards() == 0
    wait_for(goes_on(run), crew)
    head.actors()[0].kill()
    wait_for(joined(run, 2), recipe)
    head.workers()[0].kill()
    wait_for(joined(run, 3), recipe)
    wait_for(goes_on(run), crew)
    down(coordinator, crew)
    ended(recipe)
    wait_for(lambda: not head.actors())
    assert not head.workers()
    wait_for(lambda: free_cards() == 2)
    assert is_what_one_worker_gives(run)


@pytest.mark.thorough
def test_a_machine_outside_joins_and_the_coordinator_is_killed(
    head: RayNode, coordinator: Machine, ana: Machine, run: RunDir, crew: "subprocess.Popen[str]"
) -> None:
    recipe = start_workers(head, coordinator, run)
    wait_for(lambda: present(run) == {"ray"}, recipe)  # before a worker computes, as Ray starts slowly
    ana.trust(run)
    outside = ana.start("join", "--name", "ana", says=invite(coordinator))
    wait_for(lambda: present(run) == {"ray", "ana"}, outside)
    process_of(crew).kill()
    wait_for(joined(run, 4), crew)
    wait_for(goes_on(run), crew)
    recipe.send_signal(signal.SIGINT)
    ended(recipe)
    wait_for(lambda: present(run) == {"ana"} and not head.workers(), crew)
    down(coordinator, crew)
    ended(outside)
    assert is_what_one_worker_gives(run)
