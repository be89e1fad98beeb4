"""A user's Ray cluster of two machines on a network, of which one comes later and is lost again."""

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.commands import ended, goes_on, is_what_one_worker_gives, wait_for
from tests.lan import CARD, Member, ip
from tests.machines import Machine, down, invite, present, up
from tests.ports import free_port
from tests.ray_cluster import RayNode

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'
    ),
]

IMPATIENT = {  # a node without network is dead after 15 s, not after 65
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture
def cluster(network: list[Member], tmp_path: Path) -> Iterator[list[RayNode]]:
    """The head, to which a test adds the node."""
    nodes: list[RayNode] = []
    (tmp_path / "head").mkdir()
    nodes.append(RayNode(tmp_path / "head", member=network[0], **IMPATIENT))
    wait_for(nodes[0].listens)
    yield nodes
    for node in reversed(nodes):
        node.stop(patience_seconds=5)  # one node may be without network


def test_a_machine_comes_late_and_is_lost_at_no_cost(
    cluster: list[RayNode], network: list[Member], machines: list[Machine], run: RunDir, tmp_path: Path
) -> None:
    """Its cable is pulled, so no connection ends. Ray itself notices it later."""
    (head,), coordinator = cluster, machines[0]
    crew = up(coordinator, run, free_port())
    recipe = head.start("ray_crew.py", "--name", "ray", says=invite(coordinator))
    wait_for(lambda: present(run) == {"ray"}, recipe)
    (tmp_path / "late").mkdir()
    late = RayNode(tmp_path / "late", member=network[1], head=head, **IMPATIENT)
    cluster.append(late)
    wait_for(lambda: "the invite has been used" in head.talk.read_text(), recipe)
    recipe.send_signal(signal.SIGINT)
    ended(recipe)
    recipe = head.start("ray_crew.py", "--name", "ray", says=invite(coordinator))
    wait_for(lambda: present(run) == {"ray", "ray-2"}, recipe)
    wait_for(goes_on(run), crew)
    ip("-n", late.member.namespace, "link", "set", CARD, "down")
    wait_for(lambda: present(run) == {"ray"}, crew)
    wait_for(goes_on(run), crew)
    down(coordinator, crew)
    ended(recipe)
    assert head.runs()
    assert is_what_one_worker_gives(run)
