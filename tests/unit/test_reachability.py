"""Where a coordinator sits, from the files that WSL2, Docker, Podman and plain machines have, and what it advises."""

from pathlib import Path

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.host.reachability import Reachability, advice, default_card, read_reachability
from cuadrilla.link.address import dialled_address

pytestmark = pytest.mark.unit

WSL_KERNEL = "5.15.153.1-microsoft-standard-WSL2\n"
ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    "eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
)
VETH = {"proc/net/route": ROUTES, "sys/class/net/eth0/uevent": "INTERFACE=eth0\nIFINDEX=2\n"}
CARD = {**VETH, "sys/class/net/eth0/device/vendor": "0x8086\n"}


def place(root: Path, files: dict[str, str], *, address: str, system: str = "Linux", mode: str = "") -> Reachability:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_reachability(address, system=system, root=root, environ={}, mode=mode)


def test_wsl2_in_its_default_mode(tmp_path: Path) -> None:
    found = place(tmp_path, {"proc/sys/kernel/osrelease": WSL_KERNEL}, address="172.30.98.229", mode="nat")
    assert found == Reachability("wsl-nat", "in WSL2 behind the address of Windows (nat, according to wslinfo)")
    said = "\n".join(advice(found, listens="172.30.98.229:47470", dialled="", others=["192.168.1.20", "ana"]))
    assert "on a machine with an address of its own (192.168.1.20, ana)" in said
    assert (
        "netsh interface portproxy add v4tov4 listenaddress=WINDOWS_ADDRESS listenport=47470 "
        "connectaddress=172.30.98.229 connectport=47470" in said
    )
    assert "New-NetFirewallRule" in said
    assert "-LocalPort 47470 " in said
    assert "networkingMode=mirrored" in said
    assert "--address WINDOWS_ADDRESS:47470" in said


def test_the_commands_hold_the_address_that_was_given() -> None:
    found = Reachability("wsl-nat", "in WSL2")
    said = "\n".join(advice(found, listens="172.30.98.229:47470", dialled="192.168.1.50:5000", others=["ana"]))
    assert "listenaddress=192.168.1.50 listenport=5000 connectaddress=172.30.98.229 connectport=47470" in said
    assert "-LocalPort 5000 " in said
    assert "WINDOWS_ADDRESS" not in said
    assert "ana" not in said  # it has been decided where to coordinate


@pytest.mark.parametrize(
    ("files", "address", "kind"),
    [
        (
            {"mnt/c/Users/ana/.wslconfig": "\ufeff[wsl2]\r\nnetworkingMode=Mirrored\r\n"},
            "172.30.98.229",
            "wsl-mirrored",
        ),
        ({"mnt/c/Users/ana/.wslconfig": "[wsl2]\nnetworkingMode=NAT\n"}, "192.168.1.7", "wsl-nat"),
        ({"mnt/c/Users/ana/.wslconfig": "memory=8GB\n"}, "172.30.98.229", "wsl-nat"),  # not a settings file
        ({}, "172.30.98.229", "wsl-nat"),
        ({}, "192.168.1.7", "wsl-mirrored"),  # only the network of Windows has such an address
        ({}, "casa", "wsl-nat"),
    ],
)
def test_an_old_wsl2_that_does_not_say_its_mode(tmp_path: Path, files: dict[str, str], address: str, kind: str) -> None:
    assert place(tmp_path, {"proc/version": f"Linux version {WSL_KERNEL}", **files}, address=address).kind == kind


def test_a_wsl2_with_a_kernel_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "run" / "WSL").mkdir(parents=True)
    assert place(tmp_path, {"proc/sys/kernel/osrelease": "6.6.1\n"}, address="172.30.98.229", mode="nat").hidden


def test_wsl2_mirrored_needs_only_a_rule(tmp_path: Path) -> None:
    found = place(tmp_path, {"proc/sys/kernel/osrelease": WSL_KERNEL}, address="192.168.1.7", mode="mirrored")
    assert (found.kind, found.hidden) == ("wsl-mirrored", False)
    said = "\n".join(advice(found, listens="192.168.1.7:47470", dialled=""))
    assert "New-NetFirewallHyperVRule" in said
    assert "-LocalPorts 47470 " in said
    assert "portproxy" not in said


@pytest.mark.parametrize("marker", [".dockerenv", "run/.containerenv"])
def test_a_container_behind_its_host(tmp_path: Path, marker: str) -> None:
    found = place(tmp_path, {marker: "", **VETH}, address="172.17.0.2")
    name = "docker" if marker == ".dockerenv" else "podman"
    assert found == Reachability("container", f"in a container ({name}) with a network of its own")
    said = "\n".join(advice(found, listens="172.17.0.2:47470", dialled=""))
    assert "-p HOST_ADDRESS:47470:47470" in said
    assert "--address HOST_ADDRESS:47470" in said
    assert "0.0.0.0" not in said
    said = "\n".join(advice(found, listens="172.17.0.2:47470", dialled="192.168.1.50:5000"))
    assert "-p 192.168.1.50:5000:47470" in said


def test_a_container_of_docker_desktop_is_a_container_first(tmp_path: Path) -> None:
    files = {".dockerenv": "", "proc/sys/kernel/osrelease": WSL_KERNEL, **VETH}
    assert place(tmp_path, files, address="172.17.0.2").kind == "container"


@pytest.mark.parametrize(
    "files",
    [
        {},
        CARD,
        {".dockerenv": "", **CARD},  # docker run --network host
        {".dockerenv": "", **VETH, "sys/class/net/eth0/uevent": "DEVTYPE=bridge\nINTERFACE=eth0\n"},
        {"proc/1/environ": "container=lxc\0", **VETH},  # a system container, mostly on the LAN itself
        {"proc/sys/kernel/osrelease": "4.4.0-19041-Microsoft\n"},  # WSL1
        {"proc/sys/kernel/osrelease": "6.8.0-45-generic\n", "proc/version": "Linux version 6.8.0\n"},
    ],
)
def test_machines_with_an_address_of_their_own(tmp_path: Path, files: dict[str, str]) -> None:
    found = place(tmp_path, files, address="192.168.1.20")
    assert found == Reachability("plain")
    assert advice(found, listens="192.168.1.20:47470", dialled="") == []


def test_another_system_is_not_searched_for_linux_files(tmp_path: Path) -> None:
    assert place(tmp_path, {".dockerenv": "", **VETH}, address="192.168.1.20", system="Darwin") == Reachability("plain")


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
    assert str(dialled_address(given, port=47470)) == dialled


@pytest.mark.parametrize("given", ["0.0.0.0", "[::]:47470", "192.168.1.300", "casa:0", "casa:70000", "a b"])
def test_what_nobody_can_dial(given: str) -> None:
    with pytest.raises(LinkError) as caught:
        dialled_address(given, port=47470)
    assert caught.value.hint
