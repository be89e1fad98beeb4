"""Addresses, host and port: in one spelling, whatever an owner, an invite, a file or another machine has written."""

import ipaddress
import re
import socket
from dataclasses import dataclass
from functools import reduce
from typing import Self

from cuadrilla.errors import LinkError
from cuadrilla.host.card import reachable
from cuadrilla.messages import Message

DEFAULT_PORT = 47470
_PARTS = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*):(?P<port>[0-9]{1,5})")
_LABEL = "[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class Address:
    """`host`: a name or an address that a machine has, in one spelling (`canonical_host`); `port` 0: any free one.

    Raises LinkError for what is neither.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", canonical_host(self.host))
        if not 0 <= self.port <= 65535:
            raise LinkError("{port} is not a port", port=self.port, hint="use a port from 1 to 65535")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From HOST:PORT, an IPv6 address in brackets. Raises LinkError."""
        parts = _PARTS.fullmatch(text)
        if parts is None:
            raise LinkError(
                "{text!r} is not an address and a port",
                text=text[:80],
                hint="write it as 192.168.1.50:47470 (IPv6: [fd00::5]:47470)",
            )
        return cls(parts["host"], int(parts["port"]))

    def check_dialled(self) -> None:
        """Raises LinkError for a port that only a listener can ask for."""
        if not self.port:
            raise LinkError("0 is not a port that others can dial", hint="use a port from 1 to 65535")

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        """HOST:PORT as one dials it, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def canonical_host(host: str) -> str:
    """One spelling per host: small letters, compressed IPv6 without brackets. Raises LinkError."""
    text = host.strip().lower()
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        # A last label of digits is never a name: 192.168.1.300 is an address with an error in it.
        if _NAME.fullmatch(text) and not text.rpartition(".")[2].isdigit():
            return text
        raise LinkError(
            "{host!r} is neither a machine's name nor an address",
            host=host,
            hint="give the address of the coordinator on your network, such as 192.168.1.20",
        ) from None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise LinkError(
                "{host!r} contains the name of a network card, which differs on other machines",
                host=host,
                hint="give an IPv4 address, or an IPv6 address that does not begin with fe80",
            )
        address = address.ipv4_mapped or address  # spelled differently by different versions of Python
    if address.is_unspecified:
        raise LinkError(
            "{host!r} means every address of a machine; nobody can dial it",
            host=host,
            hint="give the address of the coordinator on your network, such as 192.168.1.20",
        )
    return str(address)


def listening_address(text: str) -> Address:
    """What to listen on; without a host the address by which this machine reaches its network. Raises LinkError."""
    host, port = _with_or_without_port(text)
    return Address(host or lan_address(), DEFAULT_PORT if port is None else port)


def dialled_address(text: str, *, port: int) -> Address:
    """What others dial, from `--address`; without a port it is `port`. Raises LinkError."""
    host, given = _with_or_without_port(text)
    address = Address(host, port if given is None else given)
    address.check_dialled()
    return address


def _with_or_without_port(text: str) -> tuple[str, int | None]:
    """A bare IPv6 address is all host."""
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and (":" not in host or host.endswith("]")):
        return host, int(port)
    return text, None


def lan_address() -> str:
    """The address of the network card with the default route, or the only one. Nothing is sent. Raises LinkError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that is nobody's
            address: str = probe.getsockname()[0]
        except OSError:
            return _only_address()
    return address


def _only_address() -> str:
    """On a network that leads nowhere else: a switch, a cable between two machines."""
    found = reachable()
    if not found:
        raise LinkError(
            "this machine has no network that other machines could be on",
            hint="name an address with --listen, or rehearse alone: cuadrilla train --practice 1.0,0.5",
        )
    if len(found) > 1:
        raise LinkError(
            "this machine is on several networks, and none has a default route",
            hint="name the address that the others reach: --listen {addresses}",
            addresses=reduce(lambda one, other: Message("{one} or {other}", one=one, other=other), found),
        )
    return found[0]
