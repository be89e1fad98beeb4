"""Where this machine sits on the network: whether others can dial the address it has.

A coordinator needs one port that other machines reach. WSL2 in its default mode and most containers have an address
that only their host knows. What to type there: the checks of `doctor` (`doctor/wsl.py`, `doctor/docker.py`).
"""

import ipaddress
from pathlib import Path
from typing import Literal

import psutil

from cuadrilla.host.facts import Facts
from cuadrilla.host.programs import run

Reachability = Literal["plain", "wsl-nat", "wsl-mirrored", "container"]
BEHIND_A_HOST = ("docker", "podman")  # system containers (lxc) are mostly on the LAN themselves
WSL_NAT = ipaddress.ip_network("172.16.0.0/12")
WSLINFO_SECONDS = 5.0
HOST = "HOST_ADDRESS"  # to be replaced by who types it


def read_reachability(address: str, *, facts: Facts, cards: Path = Path("/sys/class/net")) -> Reachability:
    """How this machine is placed, which others would dial at `address`. Never raises."""
    if facts.container in BEHIND_A_HOST:
        return "plain" if _is_of_host(address, cards) else "container"
    if facts.wsl != 2:
        return "plain"  # WSL1 has the network of Windows
    said = run(["wslinfo", "--networking-mode"], seconds=WSLINFO_SECONDS)
    mode = said.text.lower() if said.ok else "nat" if _is_of_wsl(address) else "mirrored"
    return "wsl-mirrored" if mode == "mirrored" else "plain" if mode == "bridged" else "wsl-nat"


def _is_of_host(address: str, cards: Path) -> bool:
    """Whether the address belongs to a real card, as with `docker run --network host`."""
    names = [name for name, own in psutil.net_if_addrs().items() if address in (each.address for each in own)]
    return any((cards / name / "device").exists() for name in names)


def _is_of_wsl(address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in WSL_NAT
    except ValueError:
        return True  # a name: WSL2's default it is
