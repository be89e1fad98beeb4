"""Four unequal machines, two of them behind a router. Cables fail in several ways, and the weights' bits stay."""

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cuadrilla.link.invite import Invite
from cuadrilla.rundir import RunDir
from tests import nat
from tests.commands import goes_on, is_what_one_worker_gives, make_run, wait_for
from tests.lan import CARD, Member, ip
from tests.limits import Share
from tests.machines import Machine, down, invite, present, up
from tests.networks import RATE, behind_router, shares, silent

pytestmark = pytest.mark.thorough

PORT = 47470
CORES = {"ana": 0.8, "luis": 0.4, "eva": 0.2, "teo": 0.1}  # eva and teo are behind the router
UNLIMITED = 64.0
FLAP = "for i in 1 2 3; do ip link set {port} down; sleep 1; ip link set {port} up; sleep 1; done"


@dataclass(frozen=True)
class Network:
    """A LAN with `coordinator`, `ana`, `luis` and a router; `eva` and `teo` have cables to the router."""

    coordinator: Member
    router: Member
    workers: dict[str, Member]


@pytest.fixture
def network() -> Iterator[Network]:
    with behind_router(3, 2) as ((coordinator, ana, luis, router), (eva, teo)):
        yield Network(coordinator, router, {"ana": ana, "luis": luis, "eva": eva, "teo": teo})


@pytest.fixture
def limits() -> Iterator[dict[str, Share]]:
    with shares(len(CORES)) as made:
        yield dict(zip(CORES, made, strict=True))


@pytest.fixture
def machine(tmp_path: Path, network: Network) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def get(name: str, member: Member, *, share: Share | None = None) -> Machine:
        prefix = (*(share.prefix if share else ()), *member.prefix)
        made.append(Machine(tmp_path / name, prefix=prefix, address=member.address))
        return made[-1]

    yield get
    for each in made:
        each.stop()


@pytest.mark.timeout(500)
def test_machines_behind_nat_are_mute_cut_off_and_forgotten(
    network: Network, limits: dict[str, Share], machine: Callable[..., Machine], tmp_path: Path
) -> None:
    """CPU limits hold from the moment when all have joined until they end, as a tenth of a core is slow at both."""
    run = make_run(tmp_path / "run", unhurried=True)
    coordinator = machine("coordinator", network.coordinator)
    crew = up(coordinator, run, PORT)
    text = invite(coordinator, "--uses", "4")
    workers = []
    for name, member in network.workers.items():
        joining = machine(name, member, share=limits[name])
        joining.trust(run)
        workers.append(joining.start("join", "--name", name, says=text))
    wait_for(lambda: present(run) == set(CORES), crew, seconds=150)
    for name, cores in CORES.items():
        limits[name].limit(cores)

    flapping = subprocess.Popen([*network.router.prefix, "sh", "-c", FLAP.format(port="inside2")])
    with silent(network.workers["eva"].namespace, CARD, rate=RATE):  # eva receives and cannot answer
        wait_for(lambda: "eva" not in present(run), crew)
    assert flapping.wait(timeout=150) == 0
    wait_for(lambda: present(run) == set(CORES), crew)

    ip("-n", network.router.namespace, "link", "set", CARD, "down")  # now only one half of the crew can commit
    wait_for(lambda: present(run) == {"ana", "luis"}, crew)
    wait_for(goes_on(run, steps=2), crew)
    ip("-n", network.router.namespace, "link", "set", CARD, "up")
    wait_for(lambda: present(run) == set(CORES), crew)

    nat.forget(network.router)
    wait_for(lambda: present(run) == {"ana", "luis"}, crew)
    wait_for(lambda: present(run) == set(CORES), crew)

    for name in CORES:
        limits[name].limit(UNLIMITED)
    down(coordinator, crew)
    assert [worker.wait(timeout=150) for worker in workers] == [0] * len(workers)
    assert is_what_one_worker_gives(run)


def test_a_coordinator_behind_nat_is_reached_by_a_published_port(
    network: Network, machine: Callable[..., Machine], run: RunDir
) -> None:
    """As in a container or WSL2, it listens on an address that only its host can reach; the invite has the host's."""
    hidden, outside = machine("coordinator", network.workers["eva"]), machine("ana", network.workers["ana"])
    nat.publish(network.router, PORT, hidden.address)
    crew = up(hidden, run, PORT, "--address", network.router.address)
    text = invite(hidden)
    assert str(Invite.parse(text).address) == f"{network.router.address}:{PORT}"
    worker = outside.start("join", "--name", "ana", says=text)
    wait_for(lambda: "ana" in present(run), worker)
    down(hidden, crew)
    assert worker.wait(timeout=150) == 0
