"""Addresses, host and port: in one spelling, whatever an owner, an invite, a file or another machine has written."""

import errno
import ipaddress
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

from cuadrilla.errors import LinkError
from cuadrilla.host.card import NetworkCard, near, read_cards, tunnel_out, way_out
from cuadrilla.messages import Message

DEFAULT_PORT = 47470
BIND_SECONDS, BIND_PAUSE_SECONDS = 3.0, 0.2
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
    text, problem = host.strip().lower(), ""
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        # A last label of digits is never a name: 192.168.1.300 is an address with an error in it.
        if _NAME.fullmatch(text) and not text.rpartition(".")[2].isdigit():
            return text
        address = ipaddress.IPv4Address(1)
        problem = "{host!r} is neither a machine's name nor an address"
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is None:
        address = address.ipv4_mapped or address  # spelled differently by different versions of Python
    if address.is_unspecified or "%" in text:
        problem = "{host!r} is not the address of one machine: it means every address, or names a network card"
    if problem:
        hint = "give the address of the coordinator on your network, such as 192.168.1.20"
        raise LinkError(problem, host=host, hint=hint)
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
    """This machine's address on its own network. Nothing is sent. Raises LinkError."""
    return local_address(way_out(), read_cards())


def local_address(out: str, cards: Sequence[NetworkCard]) -> str:
    """`out`, the address of the way to other networks, or the only one; never a VPN's. Raises LinkError.

    With a VPN as the way out: the address of the card that has a router, else the only other one.
    """
    tunnel = tunnel_out(out, cards)
    if out and tunnel is None:
        return out
    found = (near([card for card in cards if card.has_router]) if tunnel else []) or near(cards)
    if len(found) != 1:
        raise _undecided(cards)
    return found[0]


def check_free(address: str) -> None:
    """Raises LinkError when nobody can listen at `HOST:PORT`: it is taken, or no address of this machine.

    A port may be taken for a moment: by a connection of a process that was just killed, for one.
    """
    place, until = Address.parse(address), time.monotonic() + BIND_SECONDS
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    while True:
        try:
            socket.create_server((place.host, place.port), family=family).close()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise _cannot_listen(address, error) from None
            time.sleep(BIND_PAUSE_SECONDS)


def _cannot_listen(address: str, error: OSError) -> LinkError:
    if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
        reason = os.strerror(error.errno or 0)
        hint = "another program has that port; choose one with --listen"
        return LinkError("cannot listen on {address}: {reason}", address=address, reason=reason, hint=hint)
    cards = read_cards()
    return LinkError(
        "cannot listen on {address}: this machine has no such address",
        address=address,
        hint="name one that it has with --listen ({addresses}), or leave --listen out",
        addresses=", ".join(choices(cards)) or Message("none"),
    )


def choices(cards: Sequence[NetworkCard]) -> list[str]:
    """Addresses of this machine that the others may reach, as one names them; of VPNs only if there is no other."""
    best = near(cards) or [f"[{address}]" for address in near(cards, version=6)]
    return best or [address for card in cards if card.is_tunnel for address in card.addresses if ":" not in address]


def _undecided(cards: Sequence[NetworkCard]) -> LinkError:
    """A switch or a cable between two machines leads nowhere else: somebody has to choose."""
    if found := choices(cards):
        return LinkError(
            "which network of this machine the others are on is not known: none has a default route, or only a VPN",
            hint="name the address that the others reach: --listen {addresses}",
            addresses=reduce(lambda one, other: Message("{one} or {other}", one=one, other=other), found),
        )
    return LinkError(
        "this machine has no network that other machines could be on",
        hint="name an address with --listen, or rehearse alone: cuadrilla train --practice 1.0,0.5",
    )
