"""Addresses of host and port, in one spelling whether a user, an invite, a file or another machine wrote them."""

import errno
import ipaddress
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cuadrilla.errors import LinkError
from cuadrilla.host.card import NetworkCard, near, read_cards, tunnel_out, way_out
from cuadrilla.messages import Message

DEFAULT_PORT = 47470
BIND_SECONDS, BIND_PAUSE_SECONDS = 3.0, 0.2
_PARTS = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*):(?P<port>[0-9]{1,5})")
_LABEL = "[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"({_LABEL}\.)*(?![0-9]+\Z){_LABEL}")
"""A host name. 192.168.1.300 is not one, but a mistyped address: the last label must not be all digits."""


@dataclass(frozen=True)
class Address:
    """`host`: a name or an IP address; `port` 0: any free port. Raises LinkError if either is invalid."""

    host: str
    port: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", _one_spelling(self.host))
        if not 0 <= self.port <= 65535:
            raise LinkError("{port} is not a port", port=self.port, hint="use a port from 1 to 65535")

    @classmethod
    def parse(cls, text: str, *, port: int | None = None) -> Self:
        """From HOST:PORT (IPv6 in brackets), or from HOST if a default `port` is given. Raises LinkError."""
        if parts := _PARTS.fullmatch(text):
            return cls(parts["host"], int(parts["port"]))
        if port is not None:
            return cls(text, port)
        hint = "write it as 192.168.1.50:47470 (IPv6: [fd00::5]:47470)"
        raise LinkError("{text!r} is not an address and a port", text=text[:80], hint=hint)

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        """HOST:PORT, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _one_spelling(host: str) -> str:
    """A host in lower case; IPv6 compressed and without brackets. Raises LinkError."""
    text = host.strip().lower()
    try:
        address = ipaddress.ip_address(text.strip("[]"))
        usable, text = not address.is_unspecified and "%" not in text, str(address)
    except ValueError:
        usable = _NAME.fullmatch(text) is not None
    if not usable:
        hint = "name one address of that machine, such as 192.168.1.20"
        raise LinkError("{host!r} is neither a machine's name nor the address of one", host=host, hint=hint)
    return text


def listening_address(text: str) -> Address:
    """The address to listen on. Without a host in `text`, it is this machine's on its network. Raises LinkError."""
    if port := re.fullmatch(":?([0-9]*)", text):
        text = local_address(way_out(), read_cards()) + (port[1] and f":{port[1]}")
    return Address.parse(text, port=DEFAULT_PORT)


def local_address(out: str, cards: Sequence[NetworkCard]) -> str:
    """This machine's address for others: `out`, that of its default route, or its only one; never a VPN's.
    Raises LinkError."""
    if out and tunnel_out(out, cards) is None:
        return out
    found = near(cards)
    if len(found) == 1:
        return found[0]
    raise LinkError(
        "the address at which other machines reach this one is not known: it has no default route, or only a VPN's",
        hint="name it with --listen (this machine has: {addresses})",
        addresses=_listed(cards),
    )


def check_free(address: str) -> None:
    """Raises LinkError if `HOST:PORT` is taken, or is no address of this machine.

    It tries for `BIND_SECONDS`, since a killed process may leave a connection that holds its port for a moment.
    """
    place, until = Address.parse(address), time.monotonic() + BIND_SECONDS
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    while True:
        try:
            socket.create_server((place.host, place.port), family=family).close()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise LinkError(
                    "cannot listen on {address}: {reason}",
                    address=address,
                    reason=error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0),
                    hint="choose another port or address with --listen (this machine has: {addresses})",
                    addresses=_listed(read_cards()),
                ) from None
            time.sleep(BIND_PAUSE_SECONDS)


def choices(cards: Sequence[NetworkCard]) -> list[str]:
    """Addresses at which others may reach this machine, as a user types them; a VPN's only if there is no other."""
    best = near(cards) or [f"[{address}]" for address in near(cards, version=6)]
    return best or [address for card in cards if card.is_tunnel for address in card.addresses if ":" not in address]


def _listed(cards: Sequence[NetworkCard]) -> str:
    return ", ".join(choices(cards)) or Message("none")
