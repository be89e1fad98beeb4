"""A crew on a network of namespaces with limited cards: a deaf card, a new address, no way to the internet."""

from pathlib import Path

import pytest

from cuadrilla.home import Home
from cuadrilla.rundir import RunDir
from tests.commands import events, goes_on, is_what_one_worker_gives, make_run, wait_for
from tests.lan import Member, ip
from tests.machines import Machine, down, invite, present, up
from tests.networks import RATE, silent, switch_port

PORT, NUM_MACHINES = 47470, 3


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_deaf_card_and_a_new_address_cost_nothing(
    network: list[Member], machines: list[Machine], tmp_path: Path
) -> None:
    """No connection ends: both sides can only notice silence. luis comes back without anybody's help.

    First the packets to luis are lost; then his address changes, as in another Wi-Fi.
    """
    run, (coordinator, ana, luis) = make_run(tmp_path / "run", unhurried=True), machines
    for machine in (ana, luis):
        machine.trust(run)
    crew = up(coordinator, run, PORT)
    text = invite(coordinator, "--uses", "2")
    workers = [machine.start("join", "--name", name, says=text) for machine, name in ((ana, "ana"), (luis, "luis"))]
    wait_for(lambda: present(run) == {"ana", "luis"}, crew)
    with silent(*switch_port(3), rate=RATE):
        wait_for(lambda: "luis" not in present(run), crew)
        assert "lost: nothing heard" in events(run, "evicted")[0]["reason"]
        wait_for(goes_on(run, steps=2), crew)
    wait_for(lambda: "luis" in present(run), crew)
    change_address(network[2], network[2].address, "10.77.0.33")
    wait_for(lambda: "luis" not in present(run), crew)
    wait_for(lambda: "luis" in present(run), crew)
    down(coordinator, crew)
    assert [worker.wait(timeout=150) for worker in workers] == [0, 0]
    assert is_what_one_worker_gives(run)


def test_a_network_that_leads_nowhere_is_found(network: list[Member], machines: list[Machine], run: RunDir) -> None:
    """Behind a switch without a router there is no default route."""
    coordinator, _, _ = machines
    crew = coordinator.start("up", str(run.path), "--set", "engine.workers=[]")
    wait_for(lambda: Home(coordinator.home).open_file.exists(), crew)
    assert Home(coordinator.home).open_crew()["address"] == f"{network[0].address}:{PORT}"
    down(coordinator, crew)


def change_address(member: Member, before: str, after: str) -> None:
    ip("-n", member.namespace, "addr", "del", f"{before}/24", "dev", "card")
    ip("-n", member.namespace, "addr", "add", f"{after}/24", "dev", "card")
