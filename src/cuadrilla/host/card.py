"""The network cards: their addresses, which of them lead into a VPN, and whether others can dial this machine.

If a VPN is a machine's way out, its address is not the machine's address on the local network. A coordinator needs a
port that others reach; WSL2 in its default mode and most containers have an address that only their host knows. Nothing
here sends anything.
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

NOBODYS = ("192.0.2.1", 9)  # RFC 5737: an address that no machine has
TUNNEL = re.compile(r"(u?tun|wg|tailscale|ppp|ipsec|zt)[0-9]*|.*(vpn|tailscale|wireguard|nordlynx).*", re.IGNORECASE)
"""Names of tunnels' cards: Windows and some programs do not set the flag of a point-to-point card."""
LOOPBACK = re.compile(r"(?i)lo\d*$|loopback")
VIRTUAL = re.compile(r"(?i)(veth|docker|br-|virbr|cni|flannel|cali|ifb|tun|tap|wg|utun|tailscale|bridge|vethernet)")
"""Cards of containers and virtual machines: no other machine dials them, and a real card also counts their bytes."""
OWN_NETWORKS = ipaddress.ip_network("fc00::/7")  # private addresses of IPv6, like 192.168.0.0/16 of IPv4
Reachability = Literal["plain", "wsl-nat", "wsl-mirrored", "container"]
BEHIND_A_HOST = ("docker", "podman")  # system containers (lxc) are mostly on the LAN themselves
WSLINFO_SECONDS = 5.0
HOST = "HOST_ADDRESS"  # a user replaces it by the real address


@dataclass(frozen=True, kw_only=True)
class NetworkCard:
    """A card that is up. `is_tunnel`: it leads into a VPN or dials in somewhere, not into the local network."""

    name: str
    addresses: tuple[str, ...] = ()
    is_tunnel: bool = False


def read_cards() -> tuple[NetworkCard, ...]:
    cards, all_addresses = [], addresses()
    for name, stat in psutil.net_if_stats().items():
        flags = stat.flags.split(",")
        tunnel = is_tunnel(name, flags=flags)
        if stat.isup or (tunnel and "up" in flags):  # the system still routes into a tunnel whose other end is gone
            cards.append(NetworkCard(name=name, addresses=tuple(all_addresses.get(name, ())), is_tunnel=tunnel))
    return tuple(cards)


def is_tunnel(name: str, *, flags: Sequence[str]) -> bool:
    """Whether a card is a tunnel: by its name, or because it is point-to-point. `flags`: as psutil spells them."""
    return "pointopoint" in flags or TUNNEL.fullmatch(name) is not None


def real_cards(names: Iterable[str]) -> list[str]:
    """The cards that lead out of this machine: real ones if there are any, never the loopback."""
    outer = [name for name in names if not LOOPBACK.match(name)]
    return [name for name in outer if not VIRTUAL.match(name)] or outer


def way_out() -> str:
    """The IPv4 address from which this machine dials other networks; "" if it reaches none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(NOBODYS)
            address: str = probe.getsockname()[0]
        except OSError:
            return ""
    return address


def tunnel_out(address: str, cards: Sequence[NetworkCard]) -> NetworkCard | None:
    """The VPN's card if the way out is a VPN. `address`: the way out's."""
    return next((card for card in cards if card.is_tunnel and address in card.addresses), None)


def near(cards: Sequence[NetworkCard], *, version: Literal[4, 6] = 4) -> list[str]:
    """This machine's addresses on the local network: no VPN's, and of IPv6 the best one of each card.

    IPv4 addresses that a card gave itself (link-local) are returned only if there is no other.
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
    """The IP addresses of each card, without a zone (`%eth0`)."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        card: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for card, entries in psutil.net_if_addrs().items()
    }


def read_reachability(address: str, *, facts: Facts, cards: Path = Path("/sys/class/net")) -> Reachability:
    """How other machines can reach this one at `address`. Never raises."""
    if facts.container in BEHIND_A_HOST:
        return "plain" if _is_of_host(address, cards) else "container"
    if facts.wsl != 2:
        return "plain"  # WSL1 has the network of Windows
    said = run(["wslinfo", "--networking-mode"], seconds=WSLINFO_SECONDS)
    placed: dict[str, Reachability] = {"mirrored": "wsl-mirrored", "bridged": "plain"}
    return placed.get(said.text.lower(), "wsl-nat")  # also without wslinfo: WSL2's default


def _is_of_host(address: str, cards: Path) -> bool:
    """Whether the address belongs to a real card, as with `docker run --network host`."""
    names = [name for name, own in addresses().items() if address in own]
    return any((cards / name / "device").exists() for name in names)
