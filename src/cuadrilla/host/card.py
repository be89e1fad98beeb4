"""Which network card has an address, and which address that card has later: a router may give it another one."""

import ipaddress
from dataclasses import dataclass, field

import psutil


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


def reachable() -> list[str]:
    """IPv4 addresses at which others may find this machine; self-assigned ones only if it has no other."""
    running = {card for card, state in psutil.net_if_stats().items() if state.isup}
    found = [ipaddress.ip_address(text) for card, own in addresses().items() if card in running for text in own]
    others = [address for address in found if address.version == 4 and not address.is_loopback]
    return [str(address) for address in others if not address.is_link_local] or [str(address) for address in others]


@dataclass
class Whereabouts:
    """The address that others find this machine at. One that is no card's (a name, all addresses) never changes."""

    host: str
    card: str = field(init=False)

    def __post_init__(self) -> None:
        self.card = next((card for card, all_ in addresses().items() if _plain(self.host) in all_), "")

    def moved_to(self) -> str:
        """The address that the card has instead, of the same family; empty while it has the old one, or none."""
        own = [ipaddress.ip_address(text) for text in addresses().get(self.card, [])] if self.card else []
        if not own or (old := ipaddress.ip_address(_plain(self.host))) in own:
            return ""
        alike = (new for new in own if new.version == old.version and new.is_link_local == old.is_link_local)
        return str(next(alike, ""))
