"""`cuadrilla doctor` on a network with real faults: a firewall that drops or refuses, a taken port.

There are two machines on a switch. `doctor` on one machine names a command for the other; once it has been typed
there, the way is free.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.lan import CARD, Member
from tests.machines import Machine
from tests.networks import do

PORT = 47470
LISTEN = (
    f"import socket; s = socket.create_server(('{{}}', {PORT})); print('ready', flush=True); s.accept(); s.accept()"
)


def doctor(member: Member, home: Path, *arguments: str) -> list[dict[str, Any]]:
    """All findings of `doctor` on a machine."""
    done = Machine(home, prefix=member.prefix).run("doctor", "--json", "--timeout", "0.1", *arguments)
    assert done.stdout, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return rows


def of(rows: list[dict[str, Any]], check: str) -> dict[str, Any]:
    (row,) = [row for row in rows if row["check"] == check]
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
def test_a_firewall(network: list[Member], tmp_path: Path, rule: str, says: str) -> None:
    head, worker = network
    place = f"{head.address}:{PORT}"
    do(head, f"iptables -A INPUT {rule}")
    try:
        with listening(head):
            broken = of(doctor(worker, tmp_path, place), "link.tcp")
            assert says in broken["cause"]
            assert (broken["level"], broken["shell"]) == ("failure", "coordinator")
            assert broken["command"] == f"cuadrilla doctor --port {PORT}"
    finally:
        do(head, "iptables -F INPUT")
    with listening(head):
        assert of(doctor(worker, tmp_path, place), "link.tcp")["level"] == "ok"


@pytest.mark.thorough
def test_a_taken_port_and_no_network(network: list[Member], tmp_path: Path) -> None:
    head, worker = network
    with listening(head):
        row = of(doctor(head, tmp_path, "--port", str(PORT)), "network.port")
        assert row["command"].startswith("ss -ltnp")
    assert of(doctor(head, tmp_path, "--port", str(PORT)), "network.port")["level"] == "ok"
    do(worker, f"ip link set dev {CARD} down")
    try:
        rows = doctor(worker, tmp_path, f"{head.address}:{PORT}")
        assert "no network" in of(rows, "network.address")["cause"]
        assert of(rows, "link.tcp")["level"] == "failure"
    finally:
        do(worker, f"ip link set dev {CARD} up")
