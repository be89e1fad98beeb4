"""Where this machine sits on the network: whether others can dial the address it has.

A coordinator needs one port that other machines reach. WSL2 in its default mode and most containers have an address
that only their host knows. What to type there: the checks of `doctor` (`doctor/wsl.py`, `doctor/docker.py`).

`read_reachability` is the only I/O; nothing here raises, and what cannot be found out counts as a plain machine.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cuadrilla.host.container import read_text
from cuadrilla.host.facts import parse_container, parse_wsl
from cuadrilla.host.programs import run

Reachability = Literal["plain", "wsl-nat", "wsl-mirrored", "container"]
BEHIND_A_HOST = ("docker", "podman", "containerd", "oci")  # system containers (lxc) are mostly on the LAN themselves
WSL_NAT = ipaddress.ip_network("172.16.0.0/12")
WSL_CREATOR = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"  # how the Hyper-V firewall names all WSL machines
WSLINFO_SECONDS = 5.0
WINDOWS, HOST = "WINDOWS_ADDRESS", "HOST_ADDRESS"  # to be replaced by who types it


def read_reachability(
    address: str,
    *,
    system: str,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    mode: str | None = None,
) -> Reachability:
    """How a machine is placed that others would dial at `address`.

    `mode` is the answer of `wslinfo --networking-mode`; None asks it.
    """
    if system != "Linux":
        return "plain"
    container = parse_container(
        environ=environ,
        cgroup=read_text(root / "proc/1/cgroup"),
        files=[f"/{file}" for file in (".dockerenv", "run/.containerenv") if (root / file).exists()],
        init_environ=read_text(root / "proc/1/environ"),
    )
    if container in BEHIND_A_HOST and _has_own_network(root):
        return "container"
    kernel = read_text(root / "proc/sys/kernel/osrelease") or read_text(root / "proc/version")
    if (parse_wsl(kernel) or (2 if (root / "run/WSL").is_dir() else None)) != 2:
        return "plain"  # WSL1 has the network of Windows
    mode = _wsl_mode(address, root=root, mode=wslinfo() if mode is None else mode)
    return "wsl-mirrored" if mode == "mirrored" else "plain" if mode == "bridged" else "wsl-nat"


def _has_own_network(root: Path) -> bool:
    """Whether the card with the default route leads to a host: one end of a pair (veth), or a program's (tap).

    With the host's network the card is a real one, or a bridge, bond or VLAN, which say what they are. (macvlan does
    not: a container with such a card of its own is taken for one behind its host.)
    """
    card = root / "sys/class/net" / default_card(read_text(root / "proc/net/route"))
    return not (card / "device").exists() and "DEVTYPE=" not in read_text(card / "uevent")


def default_card(routes: str) -> str:
    """The card of the default route in /proc/net/route, or an empty name."""
    rows = [line.split() for line in routes.splitlines()[1:]]
    return next((row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"), "")


def _wsl_mode(address: str, *, root: Path, mode: str) -> str:
    """WSL2's networking mode, as WSL itself, the settings of Windows' user or else the address say."""
    if mode:
        return mode.lower()
    for file in sorted(root.glob("mnt/*/Users/*/.wslconfig")):
        if found := re.search(r"^\s*networkingMode\s*=\s*(\w+)", read_text(file), re.MULTILINE | re.IGNORECASE):
            return found[1].lower()
    try:
        inside = ipaddress.ip_address(address) in WSL_NAT
    except ValueError:
        inside = True  # a name: WSL2's default it is
    return "nat" if inside else "mirrored"


def wslinfo() -> str:
    """What WSL says of its own networking mode (nat, mirrored, virtioproxy, bridged, none); empty if it does not."""
    said = run(["wslinfo", "--networking-mode"], seconds=WSLINFO_SECONDS)
    return said.text if said is not None and said.ok and re.fullmatch(r"[A-Za-z]+", said.text) else ""
