"""Workers behind 1 Mbit/s, with 20 % loss both ways and a round trip of 300 ms, are slow and are not sent away."""

import sys

import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests import relay
from tests.commands import events, is_what_one_worker_gives, reached, wait_for
from tests.lan import CARD, Member, limit_rate
from tests.machines import Machine, down, invite, present, up
from tests.networks import lose, switch_port

pytestmark = pytest.mark.thorough

PORT, NUM_MACHINES = 47470, 4  # a coordinator, a relay, two workers
ONE_WAY_SECONDS = 0.15
RATE, LOSS = "1mbit", 0.2
SMALL = ("--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=1")  # 12,000 parameters
ROUNDS = 8


def weaken(network: list[Member]) -> None:
    """Limit each worker's cable both ways, and let packets get lost at both ends, the relay and the workers."""
    for index, member in enumerate(network[2:], start=3):
        for place, device in ((member.namespace, CARD), switch_port(index)):
            limit_rate(place, device, RATE)
        lose(member, share=LOSS)
        lose(network[1], share=LOSS, source=member.address)


@pytest.mark.timeout(300)
def test_a_crew_on_a_weak_line_goes_on(network: list[Member], machines: list[Machine], run: RunDir) -> None:
    """Workers dial a relay, which adds the delay, since this kernel may not be able to. A worker that is silent for 5 s
    is evicted. On such a line this may happen, but work is done, and the worker comes back."""
    coordinator, middle, *others = machines
    dialled = f"{middle.address}:{PORT}"
    way = (relay.__file__, dialled, f"{coordinator.address}:{PORT}", str(ONE_WAY_SECONDS))
    relaying = middle.start_program(sys.executable, *way)
    assert relaying.stdout is not None
    assert relaying.stdout.readline() == "ready\n"
    crew = up(coordinator, run, PORT, "--address", dialled, *SMALL)
    text = invite(coordinator, "--uses", "2")
    workers = [
        each.start("join", "--name", name, says=text) for name, each in zip(("ana", "luis"), others, strict=True)
    ]
    wait_for(lambda: present(run) == {"ana", "luis"}, crew)
    wait_for(reached(run, 1), crew)
    weaken(network)
    before = last_rows(run.metrics)[-1]["version"] + 2  # two steps may be in transit
    wait_for(reached(run, before + ROUNDS), crew, seconds=200)
    wait_for(lambda: present(run) == {"ana", "luis"}, crew, seconds=100)
    down(coordinator, crew)
    assert {row["reason"].split()[0] for row in events(run, "evicted")} <= {"lost:", "hung:"}
    for worker in workers:
        worker.kill()  # its last messages may take long on such a line
    assert is_what_one_worker_gives(run, *SMALL)
