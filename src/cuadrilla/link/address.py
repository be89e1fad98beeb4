"""The address that a coordinator listens on, and the one that others dial, from what an owner has typed."""

import re
import socket

from cuadrilla.errors import LinkError
from cuadrilla.host.card import reachable
from cuadrilla.link.invite import canonical_host, with_port

DEFAULT_PORT = 47470


def listening_address(text: str) -> str:
    """HOST:PORT to listen on; without a host the address by which this machine reaches its network. Raises."""
    host, _, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
    return f"{host or lan_address()}:{port or DEFAULT_PORT}"


def dialled_address(text: str, *, port: str) -> str:
    """HOST:PORT as others dial it, from `--address`; without a port it is `port`. Raises LinkError."""
    if not text:
        return ""
    host, _, given = text.rpartition(":") if re.search(r"[^:]:\d+$|\]:\d+$", text) else (text, "", "")
    number = int(given or port)
    if not 1 <= number <= 65535:
        raise LinkError(f"{number} is not a port that others can dial", hint="write --address HOST:PORT")
    return with_port(canonical_host(host), number)


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
            hint=f"name the address that the others reach: --listen {' or '.join(found)}",
        )
    return found[0]
