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
