"""Where a coordinator sits, from the files that WSL2, Docker, Podman and plain machines have."""

from pathlib import Path

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.host.reachability import default_card, read_reachability
from cuadrilla.link.address import Address

pytestmark = pytest.mark.unit

WSL_KERNEL = "5.15.153.1-microsoft-standard-WSL2\n"
ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    "eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
)
VETH = {"proc/net/route": ROUTES, "sys/class/net/eth0/uevent": "INTERFACE=eth0\nIFINDEX=2\n"}
CARD = {**VETH, "sys/class/net/eth0/device/vendor": "0x8086\n"}


WSL, OLD_WSL = {"proc/sys/kernel/osrelease": WSL_KERNEL}, {"proc/version": f"Linux version {WSL_KERNEL}"}
SETTINGS = "mnt/c/Users/ana/.wslconfig"
INNER, OUTER = "172.30.98.229", "192.168.1.7"


@pytest.mark.parametrize(
    ("files", "address", "mode", "placed"),
    [
        (WSL, INNER, "nat", "wsl-nat"),
        (WSL, OUTER, "mirrored", "wsl-mirrored"),
        (WSL, OUTER, "bridged", "plain"),
        ({**OLD_WSL, SETTINGS: "\ufeff[wsl2]\r\nnetworkingMode=Mirrored\r\n"}, INNER, "", "wsl-mirrored"),
        ({**OLD_WSL, SETTINGS: "[wsl2]\nnetworkingMode=NAT\n"}, OUTER, "", "wsl-nat"),
        ({**OLD_WSL, SETTINGS: "memory=8GB\n"}, INNER, "", "wsl-nat"),
        (OLD_WSL, INNER, "", "wsl-nat"),
        (OLD_WSL, OUTER, "", "wsl-mirrored"),  # only the network of Windows has such an address
        (OLD_WSL, "casa", "", "wsl-nat"),
        ({"proc/sys/kernel/osrelease": "6.6.1\n", "run/WSL/x": ""}, INNER, "nat", "wsl-nat"),  # a kernel of one's own
        ({".dockerenv": "", **VETH}, "172.17.0.2", "", "container"),
        ({"run/.containerenv": "", **VETH}, "172.17.0.2", "", "container"),
        ({".dockerenv": "", **WSL, **VETH}, "172.17.0.2", "", "container"),  # Docker Desktop's
        ({}, OUTER, "", "plain"),
        (CARD, OUTER, "", "plain"),
        ({".dockerenv": "", **CARD}, OUTER, "", "plain"),  # docker run --network host
        ({".dockerenv": "", **VETH, "sys/class/net/eth0/uevent": "DEVTYPE=bridge\n"}, OUTER, "", "plain"),
        ({"proc/1/environ": "container=lxc\0", **VETH}, OUTER, "", "plain"),  # mostly on the LAN itself
        ({"proc/sys/kernel/osrelease": "4.4.0-19041-Microsoft\n"}, OUTER, "", "plain"),  # WSL1
        ({"proc/sys/kernel/osrelease": "6.8.0-45-generic\n", "proc/version": "Linux 6.8.0\n"}, OUTER, "", "plain"),
    ],
)  # fmt: skip
def test_where_a_machine_is_placed(tmp_path: Path, files: dict[str, str], address: str, mode: str, placed: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_reachability(address, system="Linux", root=tmp_path, environ={}, mode=mode) == placed
    assert read_reachability(address, system="Darwin", root=tmp_path, environ={}, mode=mode) == "plain"


def test_a_machine_without_a_default_route_has_no_card() -> None:
    assert default_card(ROUTES) == "eth0"
    assert default_card("Iface\tDestination\n") == ""
    assert default_card("") == ""


@pytest.mark.parametrize(
    ("given", "dialled"),
    [
        ("192.168.1.50", "192.168.1.50:47470"),
        ("Casa.local:5000", "casa.local:5000"),
        ("fd00::5", "[fd00::5]:47470"),
        ("[fd00::5]:5000", "[fd00::5]:5000"),
    ],
)
def test_what_others_dial(given: str, dialled: str) -> None:
    assert str(Address.parse(given, port=47470)) == dialled


@pytest.mark.parametrize("given", ["0.0.0.0", "[::]:47470", "192.168.1.300", "casa:70000", "a b"])
def test_what_nobody_can_dial(given: str) -> None:
    with pytest.raises(LinkError) as caught:
        Address.parse(given, port=47470)
    assert caught.value.hint
