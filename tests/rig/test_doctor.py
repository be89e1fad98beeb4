"""`cuadrilla doctor` on a network with real faults: a firewall that drops or refuses, a taken port.

There are two machines on a switch. `doctor` on one machine names a command for the other; once it has been typed
there, the way is free.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lan import CARD, Member
from tests.machines import Machine
from tests.networks import do
from tests.rig.conftest import findings

PORT = 47470
LISTEN = (
    f"import socket; s = socket.create_server(('{{}}', {PORT})); print('ready', flush=True); s.accept(); s.accept()"
)


def found(machine: Machine, check: str, *arguments: str) -> dict[str, Any]:
    """The finding of one check of `doctor` on a machine."""
    (row,) = [row for row in findings(machine, *arguments) if row["check"] == check]
    return row


@contextmanager
def listening(member: Member) -> Iterator[None]:
    """Listen on a port, as a coordinator does."""
    command = [*member.prefix, sys.executable, "-c", LISTEN.format(member.address, PORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.kill()


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (f"-p tcp --dport {PORT} -j REJECT", "nothing listens"),
        pytest.param(f"-p tcp --dport {PORT} -j DROP", "no answer within", marks=pytest.mark.thorough),
        pytest.param("-p tcp -j REJECT --reject-with icmp-host-prohibited", "No route", marks=pytest.mark.thorough),
    ],
)
def test_a_firewall(network: list[Member], machines: list[Machine], rule: str, says: str) -> None:
    head, worker = network[0], machines[1]
    place = f"{head.address}:{PORT}"
    do(head, f"iptables -A INPUT {rule}")
    try:
        with listening(head):
            broken = found(worker, "link.tcp", place)
            assert says in broken["cause"]
            assert (broken["level"], broken["shell"]) == ("failure", "coordinator")
            assert broken["command"] == f"cuadrilla doctor --port {PORT}"
    finally:
        do(head, "iptables -F INPUT")
    with listening(head):
        assert found(worker, "link.tcp", place)["level"] == "ok"


@pytest.mark.thorough
def test_a_taken_port_and_no_network(network: list[Member], machines: list[Machine]) -> None:
    head, worker = machines
    with listening(network[0]):
        assert found(head, "network.port", "--port", str(PORT))["command"].startswith("ss -ltnp")
    assert found(head, "network.port", "--port", str(PORT))["level"] == "ok"
    do(network[1], f"ip link set dev {CARD} down")
    try:
        place = f"{head.address}:{PORT}"
        assert "no network" in found(worker, "network.address", place)["cause"]
        assert found(worker, "link.tcp", place)["level"] == "failure"
    finally:
        do(network[1], f"ip link set dev {CARD} up")
