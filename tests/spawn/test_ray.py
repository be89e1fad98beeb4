"""A run on the user's Ray cluster: reservations, a killed actor, a killed coordinator, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, last_rows
from tests.commands import (
    coordinator,
    ended,
    events,
    goes_on,
    is_what_one_worker_gives,
    joined,
    make_run,
    reached,
    run_program,
    start,
    stop,
    task_hash,
    wait_for,
)
from tests.machines import Machine, down, invite, present, up
from tests.ports import free_port
from tests.ray_cluster import RayNode

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"')

STRICT = ("--set", "sync.strict=true")
RAY = ("--set", 'engine.kind="ray"')
WORKERS = {"ray-127-0-0-1", "ray-127-0-0-1-2"}
FREE = """
import json, ray
ray.init(address="auto", log_to_driver=False)
print(json.dumps(ray.available_resources()))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", unhurried=True)


def in_cluster(run: RunDir, head: RayNode, *more: str) -> "subprocess.Popen[str]":
    where = f'engine.ray_address="{head.address}"'
    return start(run, *STRICT, *RAY, "--set", where, *more, env=os.environ | head.environment())


def free_cards(head: RayNode) -> float:
    environment = os.environ | head.environment() | {"RAY_ADDRESS": head.address}
    done = run_program(sys.executable, "-c", FREE, env=environment)
    return float(json.loads(done.stdout.splitlines()[-1]).get("GPU", 0))


def test_each_card_has_an_actor_and_one_that_is_killed_is_started_again(head: RayNode, run: RunDir) -> None:
    """The run has its own code, which was not approved on the cluster."""
    crew = in_cluster(run, head)
    wait_for(lambda: present(run) == WORKERS, crew)
    assert free_cards(head) == 0
    wait_for(goes_on(run), crew)
    head.actors()[0].kill()
    wait_for(joined(run, 3), crew)
    wait_for(goes_on(run), crew)
    crew.send_signal(signal.SIGINT)
    said = ended(crew, code=130)
    assert not [words for words in ("Traceback", "raylet", "core_worker", ".cc:") if words in said], said
    assert not head.actors()
    assert free_cards(head) == 2
    assert events(run, "left")[0]["worker"] in WORKERS
    assert is_what_one_worker_gives(run, *STRICT)


@pytest.mark.thorough
def test_a_machine_outside_joins_and_the_coordinator_is_killed(head: RayNode, run: RunDir, tmp_path: Path) -> None:
    outside = Machine(tmp_path / "ana", talk=tmp_path / "talk")

    class Driver(Machine):
        def environment(self) -> dict[str, str]:
            return super().environment() | head.environment() | {"CUADRILLA_HOME": str(self.home)}

    driver = Driver(tmp_path / "driver", talk=tmp_path / "driver.talk")
    sets = (*STRICT, *RAY, "--set", f'engine.ray_address="{head.address}"')
    try:
        Home(outside.home).trust(task_hash(run.path))
        crew = up(driver, run, free_port(), *sets, workers="[1.0]")
        wait_for(lambda: present(run) == WORKERS, crew)  # before a worker computes, as Ray starts slowly
        ana = outside.start("join", "--name", "ana", says=invite(driver))
        wait_for(lambda: present(run) == {*WORKERS, "ana"}, crew)
        number = len(events(run, "joined"))
        coordinator(crew).kill()
        wait_for(joined(run, number + 3), crew)
        wait_for(goes_on(run), crew)
        down(driver, crew)
        assert ana.wait(timeout=100) == 0
    finally:
        driver.stop()
        outside.stop()
    wait_for(lambda: not head.actors())
    assert is_what_one_worker_gives(run, *STRICT)


@pytest.mark.thorough
def test_the_ranks_of_a_ray_train_run_are_one_worker(head: RayNode, run: RunDir) -> None:
    crew = in_cluster(run, head, "--set", "engine.ranks=true")
    wait_for(reached(run, 10), crew)
    stop(crew)
    assert {row["worker"] for row in events(run, "joined")} == {"ray-127-0-0-1"}
    wait_for(lambda: free_cards(head) == 2)
    assert is_what_one_worker_gives(run, *STRICT)


@pytest.mark.thorough
def test_ray_starts_here_where_it_runs_nowhere(run: RunDir, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    crew = start(run, *STRICT, *RAY, "--stop-at", "5", env=environment | {"CUADRILLA_HOME": str(tmp_path / "home")})
    ended(crew)
    assert last_rows(run.metrics)[-1]["version"] == 5


@pytest.mark.thorough
def test_a_cluster_that_is_not_there_is_said(run: RunDir) -> None:
    crew = start(run, *RAY, "--set", f'engine.ray_address="127.0.0.1:{free_port()}"')
    said = ended(crew, code=5)
    assert "no Ray cluster at 127.0.0.1:" in said
    assert "is its head running" in said
