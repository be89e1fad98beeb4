"""`cuadrilla check link`: the way to the coordinator, one step after another, until the first that is broken.

    name → route → tcp → tls → credentials → clock → download → upload → average

A machine that has joined no crew yet ends at tls: what answers calls itself a coordinator, and nobody vouches for it.

Each step needs the ones before it, so the first broken one is the cause, and its hint the remedy. The clock is for
information: nothing depends on it. Every step has a time limit (the system's own for a name). Nothing is sent before
TLS has shown that the other end holds the key of a coordinator of this crew. The first four steps need nothing but
sockets; the others are calls (`check_calls`).
"""

import contextlib
import errno
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.tls import HUNG_UP, NO_TLS, SERVER_NAME, is_of_coordinator, load_node
from cuadrilla.messages import Message

CONNECT_SECONDS = 5.0
SMALL_SEGMENT_BYTES = 1200
"""Of TCP in a packet: 1280 bytes, the least that IPv6 allows, hold 1208. As both ends' cards allow it; a smaller packet
between them is noticed only by what is lost.
"""
NOT_YET_VALID = 9  # X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL
ANOTHER_PROGRAM = Message(
    "check the port: another program may be listening there (on the coordinator: cuadrilla up prints its address)"
)
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """One step: what was found, or why it is broken and what to do."""

    step: str
    ok: bool
    reason: str
    hint: str = ""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom to dial, as whom, and how long to measure."""

    address: Address
    folder: Path
    """Holds this node's keys."""
    seconds: float


def check_link(target: Target) -> Iterator[CheckedStep]:
    """The steps as they are done; behind a broken one there is none. Raises LinkError for keys that cannot be used."""
    identity = load_node(target.folder)
    row = None
    for row in check_way(target):
        yield row
    if row is None or not row.ok:
        return
    yield (row := _do("tls", lambda: _tls_of_crew(target, identity.ca.decode())))
    if not row.ok:
        return
    from cuadrilla.link.check_calls import Calls  # not before: it loads torch, which takes seconds

    with contextlib.closing(Calls(str(target.address), identity=identity, seconds=target.seconds)) as calls:
        for name, step in calls.steps():
            yield (row := _do(name, step))
            if not row.ok:
                return


def check_unjoined(target: Target) -> Iterator[CheckedStep]:
    """The steps that need no keys: for a machine that has joined no crew yet."""
    row = None
    for row in check_way(target):
        yield row
    if row is not None and row.ok:
        yield _do("tls", lambda: _tls_of_any(target))


def check_way(target: Target) -> Iterator[CheckedStep]:
    """The steps before anything is said to the other end."""
    for name, step in (
        ("name", lambda: _name(target)),
        ("route", lambda: _route(target)),
        ("tcp", lambda: _tcp(target)),
    ):
        yield (row := _do(name, step))
        if not row.ok:
            return


def _do(name: str, step: Callable[[], tuple[str, str]]) -> CheckedStep:
    began = time.monotonic()
    try:
        reason, hint = step()
    except LinkError as error:
        return CheckedStep(step=name, ok=False, reason=error.message, hint=error.hint, seconds=time.monotonic() - began)
    return CheckedStep(step=name, ok=True, reason=reason, hint=hint, seconds=time.monotonic() - began)


def _name(target: Target) -> tuple[str, str]:
    found = list(dict.fromkeys(str(place[0]) for _, place in _addresses(target)))
    host = target.address.host
    if found == [host]:
        return Message("{host} is an address", host=host), ""
    return Message("{host} is {addresses}", host=host, addresses=", ".join(found)), ""


def _route(target: Target) -> tuple[str, str]:
    """Which of this machine's addresses would be used; a connected UDP socket knows, and sends nothing."""
    family, place = _addresses(target)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)
        except OSError as error:
            raise LinkError(
                "this machine has no route to {place}: {reason}",
                place=place[0],
                reason=error.strerror or error,
                hint="connect it to the coordinator's network (cable, Wi-Fi, VPN), then try again",
            ) from None
        own = str(probe.getsockname()[0])
    card = next((card for card, all_ in psutil.net_if_addrs().items() if own in (each.address for each in all_)), "")
    return Message("from {own} ({card})", own=own, card=card) if card else Message("from {own}", own=own), ""


def _tcp(target: Target) -> tuple[str, str]:
    with _connected(target) as plain:
        told = Message("{address} answers at {place}", address=target.address, place=plain.getpeername()[0])
        segment = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) if hasattr(socket, "TCP_MAXSEG") else 0
    if not 0 < segment < SMALL_SEGMENT_BYTES:
        return told, ""
    return told, Message(
        "its packets bring {segment} bytes at most, which is slow: one of the two machines has a card with a small MTU "
        "(`cuadrilla doctor` there says which)",
        segment=segment,
    )


def _tls_of_crew(target: Target, ca: str) -> tuple[str, str]:
    """The other end holds the key of a certificate that this crew's CA has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca)
    context.load_cert_chain(target.folder / "node.pem", target.folder / "node.key")
    version, _ = _shaken(target, context)
    return Message("{version}, the key belongs to this crew", version=version), ""


def _tls_of_any(target: Target) -> tuple[str, str]:
    """The other end shows a certificate such as coordinators make for themselves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    version, certificate = _shaken(target, context)
    if not is_of_coordinator(certificate):
        raise LinkError(
            "what answers at {address} is no coordinator of cuadrilla", address=target.address, hint=ANOTHER_PROGRAM
        )
    return Message("{version}, a coordinator of cuadrilla", version=version), ""


def _shaken(target: Target, context: ssl.SSLContext) -> tuple[str | None, bytes]:
    """The version of TLS and the other end's certificate (DER). Raises LinkError."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    try:
        with (
            _connected(target) as plain,
            context.wrap_socket(plain, server_hostname=SERVER_NAME) as secure,
        ):
            version, protocol = secure.version(), secure.selected_alpn_protocol()
            certificate = secure.getpeercert(binary_form=True)
    except ssl.SSLCertVerificationError as error:
        raise _untrusted(target, error) from None
    except TimeoutError:
        silent = "what answers at {address} said nothing for {seconds:g} s"
        raise LinkError(silent, address=target.address, seconds=CONNECT_SECONDS, hint=ANOTHER_PROGRAM) from None
    except ssl.SSLError as error:
        reason = error.reason or HUNG_UP
        raise LinkError(NO_TLS, address=target.address, reason=reason, hint=ANOTHER_PROGRAM) from None
    except OSError as error:
        hung_up = "what answers at {address} closed the connection ({reason})"
        reason = error.strerror or str(error)
        raise LinkError(hung_up, address=target.address, reason=reason, hint=ANOTHER_PROGRAM) from None
    if protocol != "h2":
        another = "what answers at {address} speaks TLS, but not the crew link"
        raise LinkError(another, address=target.address, hint=ANOTHER_PROGRAM)
    assert certificate is not None  # TLS 1.3 has no servers without a certificate
    return version, certificate


def _untrusted(target: Target, error: ssl.SSLCertVerificationError) -> LinkError:
    if error.verify_code == NOT_YET_VALID:
        return LinkError(
            "this machine's clock is earlier than the day the crew was created",
            hint="set this machine's clock, then try again",
        )
    return LinkError(
        "what answers at {address} is not the coordinator of the crew that this machine has joined",
        address=target.address,
        hint="check the address; if the crew was recreated there, get an invite, then: cuadrilla join --new",
    )


def _addresses(target: Target) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Family and socket address, as the system prefers them."""
    try:
        found = socket.getaddrinfo(target.address.host, target.address.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise LinkError(
            "no machine named {host} is known here ({reason})",
            host=target.address.host,
            reason=getattr(error, "strerror", None) or error,
            hint="give the coordinator's IP address: cuadrilla check link 192.168.1.50:{port}",
            port=target.address.port,
        ) from None
    return [(family, place) for family, _, _, _, place in found]  # type: ignore[misc]


@contextlib.contextmanager
def _connected(target: Target) -> Iterator[socket.socket]:
    """A TCP connection. Raises LinkError if there is none; what happens on it is the caller's."""
    firewall = Message(
        "it may have another address by now; its screen shows it: cuadrilla check link THAT_ADDRESS. If not, "
        "allow TCP port {port} in the firewall of the coordinator's machine",
        port=target.address.port,
    )
    try:
        plain = socket.create_connection((target.address.host, target.address.port), timeout=CONNECT_SECONDS)
    except TimeoutError:
        problem = "{address} did not answer within {seconds:g} s"
        raise LinkError(problem, address=target.address, seconds=CONNECT_SECONDS, hint=firewall) from None
    except ConnectionRefusedError:
        raise LinkError(
            "nothing listens at {address}",
            address=target.address,
            hint="start the coordinator there (cuadrilla up RUN); it may have another address by now; its "
            "screen shows it: cuadrilla check link THAT_ADDRESS. If not, compare the port that it prints",
        ) from None
    except OSError as error:
        hint = _apart() if error.errno in UNREACHABLE else firewall
        reason = error.strerror or error
        raise LinkError("cannot reach {address}: {reason}", address=target.address, reason=reason, hint=hint) from None
    with plain:
        yield plain


def _apart() -> Message:
    """What to do where the network does not lead there."""
    if sys.platform == "darwin":  # macOS 15 and later ask for each program
        return Message("System Settings, Privacy & Security, Local Network: allow this terminal; then try again")
    return Message(
        "it may have another address by now; its screen shows it: cuadrilla check link THAT_ADDRESS. If not, "
        "check that both machines are on the same network and that the Wi-Fi does not isolate them"
    )
