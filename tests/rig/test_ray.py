"""A user's Ray cluster of two machines on a network, of which one is lost."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lan import CARD, Member, ip
from cuadrilla.rundir import RunDir
from tests.commands import COMMAND, goes_on, is_what_one_worker_gives, wait_for
from tests.machines import Machine, present
from tests.ray_cluster import RayNode

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'
    ),
]


@pytest.fixture
def cluster(network: list[Member], tmp_path: Path) -> Iterator[list[RayNode]]:
    nodes: list[RayNode] = []
    for name, member in zip(("head", "node"), network, strict=True):
        (tmp_path / name).mkdir()
        nodes.append(RayNode(tmp_path / name, member=member, head=nodes[0] if nodes else None))
        wait_for(nodes[0].listens)
    yield nodes
    for node in reversed(nodes):
        node.stop(patience_seconds=5)  # one node may be without network


def test_a_machine_that_is_lost_costs_nothing(cluster: list[RayNode], run: RunDir) -> None:
    """Its cable is pulled, so no connection ends. Ray itself notices it half a minute later."""
    head, lost = cluster
    driver = Machine(
        head.home, prefix=(*head.member.prefix, "env", *(f"{k}={v}" for k, v in head.environment().items()))
    )
    sets = ("--set", 'engine.kind="ray"', "--set", f'engine.ray_address="{head.address}"')
    crew = driver.start_program(*COMMAND, "train", str(run.run_file), *sets)
    try:
        wait_for(lambda: present(run) == {"ray-10-77-0-1", "ray-10-77-0-2"}, crew)
        wait_for(goes_on(run), crew)
        ip("-n", lost.member.namespace, "link", "set", CARD, "down")
        wait_for(lambda: present(run) == {"ray-10-77-0-1"}, crew)
        wait_for(goes_on(run), crew)
        crew.terminate()
        said = crew.communicate(timeout=150)[1]
    finally:
        driver.stop()
    assert crew.returncode == 130, said
    assert head.runs()
    assert is_what_one_worker_gives(run)
