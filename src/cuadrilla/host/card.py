"""The network cards: their addresses, and which of them lead into a VPN.

A VPN that is the way out of a machine is not the network that the machines beside it are on. Reading sends nothing.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from cuadrilla.host.container import read_text
from cuadrilla.host.reachability import default_card
from cuadrilla.host.usage import PSUTIL_ERRORS

NOBODYS = ("192.0.2.1", 9)  # RFC 5737: an address that is nobody's
TUNNEL = re.compile(r"(u?tun|wg|tailscale|ppp|ipsec|zt)[0-9]*|.*(vpn|tailscale|wireguard|nordlynx).*", re.IGNORECASE)
"""Names of their cards: Windows and some programs leave out the flag that says so."""
OWN_NETWORKS = ipaddress.ip_network("fc00::/7")  # of IPv6: as 192.168.0.0/16 is of IPv4
GATEWAY, HAS_GATEWAY = 2, 0x2  # of /proc/net/route: the column, and the flag that it is a router's
FLEETING = 0x01 | 0x20  # of /proc/net/if_inet6 (if_addr.h): temporary, and no longer to be used


@dataclass(frozen=True, kw_only=True)
class NetworkCard:
    """One that is up. `addresses`: those that stay before those that change every day."""

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 1500
    is_default: bool = False
    """The way to other networks."""
    has_router: bool = False
    """Some network is reached over a router on this card's."""
    is_tunnel: bool = False
    """It leads into a VPN, or dials in somewhere: not to the machines beside this one."""


def read_cards() -> tuple[NetworkCard, ...]:
    """Never raises."""
    try:
        stats, all_addresses = psutil.net_if_stats(), addresses()
    except PSUTIL_ERRORS:
        return ()
    routes = read_text(Path("/proc/net/route"))
    default, routed = default_card(routes), routed_cards(routes)
    fleeting = fleeting_addresses(read_text(Path("/proc/net/if_inet6")))
    cards = []
    for name, stat in stats.items():
        flags = stat.flags.split(",")
        tunnel = is_tunnel(name, flags=flags)
        if stat.isup or (tunnel and "up" in flags):  # the system uses a tunnel that has lost its other end
            own = sorted((each for each in all_addresses.get(name, []) if each), key=fleeting.__contains__)
            cards.append(
                NetworkCard(
                    name=name,
                    addresses=tuple(own),
                    mtu=stat.mtu,
                    is_default=name == default,
                    has_router=name in routed,
                    is_tunnel=tunnel,
                )
            )
    return tuple(cards)


def is_tunnel(name: str, *, flags: Sequence[str]) -> bool:
    """`flags`: as psutil spells them; a card that has a single other end is one, whatever its name."""
    return "pointopoint" in flags or TUNNEL.fullmatch(name) is not None


def routed_cards(routes: str) -> set[str]:
    """Those with a router, of /proc/net/route."""
    rows = [line.split() for line in routes.splitlines()[1:]]
    return {row[0] for row in rows if len(row) > 3 and row[GATEWAY].strip("0") and int(row[3], 16) & HAS_GATEWAY}


def fleeting_addresses(text: str) -> set[str]:
    """IPv6 addresses of /proc/net/if_inet6 that will be others tomorrow."""
    rows = [line.split() for line in text.splitlines()]
    return {str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if len(row) > 4 and int(row[4], 16) & FLEETING}


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
    for card in cards:
        own = [ipaddress.ip_address(text) for text in card.addresses if not card.is_tunnel]
        fit = [each for each in own if each.version == version and not each.is_loopback]
        if version == 6:
            best = [each for each in fit if each in OWN_NETWORKS] or fit
            fit = [each for each in best if not each.is_link_local][:1]
        found += fit
    return [str(each) for each in found if not each.is_link_local] or [str(each) for each in found]


def addresses() -> dict[str, list[str]]:
    """The IP addresses of each card, as numbers without a zone."""
    return {
        card: [plain for entry in entries if (plain := _plain(entry.address))]
        for card, entries in psutil.net_if_addrs().items()
    }


def _plain(text: str) -> str:
    """An address without its zone; empty for what is none (a hardware address)."""
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return ""
