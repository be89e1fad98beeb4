"""Which address `up` chooses: one of the local network, never of a VPN; and where the user must choose."""

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.host.card import NetworkCard, is_tunnel
from cuadrilla.link.address import local_address

LAN = NetworkCard(name="enp3s0", addresses=("192.168.1.20", "fe80::1"))
DOCKER = NetworkCard(name="docker0", addresses=("172.17.0.1",))
VPN = NetworkCard(name="tun0", addresses=("10.8.0.2",), is_tunnel=True)
LOOP = NetworkCard(name="lo", addresses=("127.0.0.1", "::1"))
SIX = NetworkCard(name="enp3s0", addresses=("2001:db8:1::5", "fd77::5", "fe80::1"))


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("proton0", "up,pointopoint,running,noarp", True),
        ("wg0", "up,running,noarp", True),
        ("tailscale0", "", True),
        ("My VPN", "", True),  # a connection of Windows
        ("enp3s0", "up,broadcast,running,multicast", False),
        ("tap0", "up,broadcast,running,multicast", False),  # the way out of a container without root
        ("Ethernet 2", "", False),
        ("tunas", "", False),
    ],
)
def test_tunnels(name: str, flags: str, expected: bool) -> None:
    assert is_tunnel(name, flags=flags.split(",")) is expected


@pytest.mark.parametrize(
    ("out", "cards", "expected"),
    [
        ("192.168.1.20", [LOOP, LAN, DOCKER], "192.168.1.20"),
        ("192.168.1.20", [LOOP, LAN, VPN], "192.168.1.20"),  # a VPN that some addresses are reached over
        ("10.8.0.2", [LOOP, VPN, DOCKER, LAN], "192.168.1.20"),
        ("", [LOOP, NetworkCard(name="eth0", addresses=("169.254.3.4", "fe80::1"))], "169.254.3.4"),
        ("", [LOOP, VPN, NetworkCard(name="eth0", addresses=("10.0.0.1",))], "10.0.0.1"),
        ("203.0.113.5", [], "203.0.113.5"),  # nothing known of cards: what the system says
    ],
)
def test_the_address_on_the_local_network(out: str, cards: list[NetworkCard], expected: str) -> None:
    assert local_address(out, cards) == expected


@pytest.mark.parametrize(
    ("out", "cards", "known"),
    [
        ("", [LOOP, VPN], "10.8.0.2"),
        ("10.8.0.2", [VPN, DOCKER, LAN, NetworkCard(name="eth0", addresses=("10.0.0.1",))], "192.168.1.20, 10.0.0.1"),
        ("10.8.0.2", [LOOP, VPN, SIX], "[fd77::5]"),
        ("", [LOOP, NetworkCard(name="eth0", addresses=("fe80::1",))], "none"),
    ],
)
def test_somebody_must_choose(out: str, cards: list[NetworkCard], known: str) -> None:
    with pytest.raises(LinkError) as caught:
        local_address(out, cards)
    assert f"(this machine has: {known})" in caught.value.hint
    assert caught.value.exit_code == 5
