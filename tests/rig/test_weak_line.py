"""Workers behind 1 Mbit/s with 20 % loss both ways and a round trip of 300 ms: slow, and none is sent away for it."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.lan import CARD, Member, lan, limit_rate
from cuadrilla.rundir import RunDir, last_rows
from tests import relay
from tests.commands import events, is_what_one_worker_gives, reached, wait_for
from tests.machines import Machine, down, invite, present, up
from tests.networks import lose, need_namespaces, switch_port

pytestmark = pytest.mark.thorough

PORT = 47470
ONE_WAY_SECONDS = 0.15
RATE, LOSS = "1mbit", 0.2
SMALL = ("--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=1")  # 12,000 parameters
ROUNDS = 8


@dataclass(frozen=True)
class Network:
    coordinator: Member
    relay: Member
    workers: dict[str, Member]


@pytest.fixture
def network() -> Iterator[Network]:
    """Workers dial a relay, which adds the delay that this kernel may not be able to."""
    need_namespaces()
    with lan(4, rate="400mbit") as (coordinator, middle, ana, luis):
        command = [*middle.prefix, sys.executable, relay.__file__, f"{middle.address}:{PORT}",
                   f"{coordinator.address}:{PORT}", str(ONE_WAY_SECONDS)]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Network(coordinator, middle, {"ana": ana, "luis": luis})
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def machines(network: Network, tmp_path: Path) -> Iterator[dict[str, Machine]]:
    members = {"coordinator": network.coordinator, **network.workers}
    made = {
        name: Machine(tmp_path / name, prefix=member.prefix, address=member.address) for name, member in members.items()
    }
    yield made
    for machine in made.values():
        machine.stop()


def weaken(network: Network) -> None:
    for index, member in enumerate(network.workers.values(), start=3):
        for place, device in ((member.namespace, CARD), switch_port(index)):
            limit_rate(place, device, RATE)
        lose(member, share=LOSS)
        lose(network.relay, share=LOSS, source=member.address)


@pytest.mark.timeout(300)
def test_a_crew_on_a_weak_line_goes_on(network: Network, machines: dict[str, Machine], run: RunDir) -> None:
    """Who is not heard for 5 s is evicted: that may happen on such a line, but work is done, and it is back."""
    coordinator = machines["coordinator"]
    crew = up(coordinator, run, PORT, "--address", f"{network.relay.address}:{PORT}", *SMALL)
    text = invite(coordinator, "--uses", "2")
    workers = [machines[name].start("join", "--name", name, says=text) for name in network.workers]
    wait_for(lambda: present(run) == set(network.workers), crew)
    wait_for(reached(run, 1), crew)
    weaken(network)
    before = last_rows(run.metrics)[-1]["version"] + 2  # two may be on their way
    wait_for(reached(run, before + ROUNDS), crew, seconds=200)
    wait_for(lambda: present(run) == set(network.workers), crew, seconds=100)
    down(coordinator, crew)
    assert {row["reason"].split()[0] for row in events(run, "evicted")} <= {"lost:", "hung:"}
    for worker in workers:
        worker.kill()  # the last word may take long on such a line
    assert is_what_one_worker_gives(run, *SMALL)
