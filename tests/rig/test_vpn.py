"""Machines whose default route is a VPN, or that have only IPv6: the findings of `doctor`, and the command `up`.

The VPNs are cards of the kernel's tun driver without another end, with the real routes of OpenVPN and WireGuard.
"""

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cuadrilla.home import Home
from cuadrilla.rundir import RunDir
from tests.commands import wait_for
from tests.lan import CARD, Member
from tests.machines import Machine, down, invite, present
from tests.networks import do
from tests.rig.conftest import findings

VPN = "10.8.0.2"
WAYS_OUT: dict[str, tuple[str, ...]] = {
    "openvpn": ("route add 0.0.0.0/1 dev tun0", "route add 128.0.0.0/1 dev tun0"),
    "wireguard": (
        "route add default dev tun0 table 51820",
        "rule add not fwmark 51820 table 51820",
        "rule add table main suppress_prefixlength 0",  # comes first, with all routes but the default one
    ),
}


@pytest.fixture(autouse=True)
def way_out(network: list[Member]) -> None:
    for member in network:
        do(member, f"ip route add default via 10.77.0.254 dev {CARD}")


@contextmanager
def vpn(member: Member, kind: str) -> Iterator[None]:
    """Start the VPN, through which all packets go that are not for the LAN."""
    do(member, "ip tuntap add dev tun0 mode tun")
    do(member, f"ip addr add {VPN}/24 dev tun0")
    do(member, "ip link set tun0 up")
    for command in WAYS_OUT[kind]:
        do(member, f"ip {command}")
    yield
    do(member, "ip link del tun0")
    if kind == "wireguard":
        do(member, "ip rule del table 51820")


def wrong(machine: Machine) -> dict[str, dict[str, Any]]:
    """Findings of `doctor` about the network, except those that are ok."""
    rows = [row for row in findings(machine) if row["check"].startswith("network.")]
    return {row["check"]: row for row in rows if row["level"] != "ok"}


def started(machine: Machine, run: RunDir, command: str) -> "subprocess.Popen[str]":
    """Run the command that `doctor` printed, for this run, and without a worker beside the coordinator."""
    _, *arguments = shlex.split(command)
    process = machine.start(*arguments, str(run.path), "--set", "engine.workers=[]")
    wait_for(lambda: Home(machine.home).open_file.exists(), process)
    return process


@pytest.mark.parametrize("kind", ["wireguard", "openvpn"])
def test_a_vpn_that_is_the_way_out_is_noticed(kind: str, network: list[Member], machines: list[Machine]) -> None:
    head, _ = machines
    with vpn(network[0], kind):
        row = wrong(head)["network.address"]
        assert row["fields"] == {"card": "tun0", "addresses": network[0].address}
        assert row["command"] == f"cuadrilla up --listen {network[0].address}"
        assert row["remedy"].endswith(f"cuadrilla up --listen {VPN}")
    assert not wrong(head)


@pytest.mark.thorough
def test_only_ipv6(network: list[Member], machines: list[Machine], run: RunDir) -> None:
    """Machines can join at the address that `up` prints."""
    head, worker = machines
    for number, member in enumerate(network, start=1):
        do(member, f"ip -6 addr add fd77::{number}/64 dev {CARD} nodad")
        do(member, f"ip -4 addr flush dev {CARD}")
    row = wrong(head)["network.address"]
    assert row["command"] == "cuadrilla up --listen '[fd77::1]'"
    crew = started(head, run, row["command"])
    assert not wrong(head)
    luis = worker.start("join", "--name", "luis", says=invite(head))
    wait_for(lambda: present(run) == {"luis"}, crew)
    down(head, crew)
    assert luis.wait(timeout=150) == 0
