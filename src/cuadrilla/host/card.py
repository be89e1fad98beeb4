"""The network cards: their addresses, which of them lead into a VPN, and whether others can dial this machine.

A VPN that is the way out of a machine is not the network that the machines beside it are on. A coordinator needs one
port that others reach; WSL2 in its default mode and most containers have an address that only their host knows. Reading
sends nothing.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from cuadrilla.host.facts import Facts
from cuadrilla.host.programs import run

NOBODYS = ("192.0.2.1", 9)  # RFC 5737: an address that is nobody's
TUNNEL = re.compile(r"(u?tun|wg|tailscale|ppp|ipsec|zt)[0-9]*|.*(vpn|tailscale|wireguard|nordlynx).*", re.IGNORECASE)
"""Names of their cards: Windows and some programs leave out the flag that says so."""
LOOPBACK = re.compile(r"(?i)lo\d*$|loopback")
VIRTUAL = re.compile(r"(?i)(veth|docker|br-|virbr|cni|flannel|cali|ifb|tun|tap|wg|utun|tailscale|bridge|vethernet)")
"""Cards of containers and virtual machines: nobody on the network dials them, and a real one counts their bytes."""
OWN_NETWORKS = ipaddress.ip_network("fc00::/7")  # of IPv6: as 192.168.0.0/16 is of IPv4
Reachability = Literal["plain", "wsl-nat", "wsl-mirrored", "container"]
BEHIND_A_HOST = ("docker", "podman")  # system containers (lxc) are mostly on the LAN themselves
WSLINFO_SECONDS = 5.0
HOST = "HOST_ADDRESS"  # to be replaced by who types it


@dataclass(frozen=True, kw_only=True)
class NetworkCard:
    """One that is up. `is_tunnel`: it leads into a VPN, or dials in somewhere: not to the machines beside this one."""

    name: str
    addresses: tuple[str, ...] = ()
    is_tunnel: bool = False


def read_cards() -> tuple[NetworkCard, ...]:
    cards, all_addresses = [], addresses()
    for name, stat in psutil.net_if_stats().items():
        flags = stat.flags.split(",")
        tunnel = is_tunnel(name, flags=flags)
        if stat.isup or (tunnel and "up" in flags):  # the system uses a tunnel that has lost its other end
            cards.append(NetworkCard(name=name, addresses=tuple(all_addresses.get(name, ())), is_tunnel=tunnel))
    return tuple(cards)


def is_tunnel(name: str, *, flags: Sequence[str]) -> bool:
    """`flags`: as psutil spells them; a card that has a single other end is one, whatever its name."""
    return "pointopoint" in flags or TUNNEL.fullmatch(name) is not None


def real_cards(names: Iterable[str]) -> list[str]:
    """Those that lead out of this machine: real ones if there are any, never the loopback."""
    outer = [name for name in names if not LOOPBACK.match(name)]
    return [name for name in outer if not VIRTUAL.match(name)] or outer


def way_out() -> str:
    """The IPv4 address that this machine dials other networks from; "" if it reaches none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(NOBODYS)
            address: str = probe.getsockname()[0]
        except OSError:
            return ""
    return address


def tunnel_out(address: str, cards: Sequence[NetworkCard]) -> NetworkCard | None:
    """The VPN that is the way out, which has this address."""
    return next((card for card in cards if card.is_tunnel and address in card.addresses), None)


def near(cards: Sequence[NetworkCard], *, version: Literal[4, 6] = 4) -> list[str]:
    """Addresses at which the machines beside this one may find it: no VPN's, and of IPv6 the best of each card.

    IPv4 addresses that a card gave itself only if there is no other.
    """
    found = []
    real = real_cards(card.name for card in cards if not card.is_tunnel)
    for card in cards:
        own = [ipaddress.ip_address(text) for text in card.addresses if card.name in real]
        fit = [each for each in own if each.version == version]
        if version == 6:
            best = [each for each in fit if each in OWN_NETWORKS] or fit
            fit = [each for each in best if not each.is_link_local][:1]
        found += fit
    return [str(each) for each in found if not each.is_link_local] or [str(each) for each in found]


def addresses() -> dict[str, list[str]]:
    """The IP addresses of each card, as numbers without a zone."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        card: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for card, entries in psutil.net_if_addrs().items()
    }


def read_reachability(address: str, *, facts: Facts, cards: Path = Path("/sys/class/net")) -> Reachability:
    """How this machine is placed, which others would dial at `address`. Never raises."""
    if facts.container in BEHIND_A_HOST:
        return "plain" if _is_of_host(address, cards) else "container"
    if facts.wsl != 2:
        return "plain"  # WSL1 has the network of Windows
    said = run(["wslinfo", "--networking-mode"], seconds=WSLINFO_SECONDS)
    placed: dict[str, Reachability] = {"mirrored": "wsl-mirrored", "bridged": "plain"}
    return placed.get(said.text.lower(), "wsl-nat")  # also where there is no wslinfo: what WSL2 is without a setting


def _is_of_host(address: str, cards: Path) -> bool:
    """Whether the address belongs to a real card, as with `docker run --network host`."""
    names = [name for name, own in addresses().items() if address in own]
    return any((cards / name / "device").exists() for name in names)
