"""The way to a coordinator (`doctor HOST:PORT`), one step after another, until the first that is broken.

    tcp → tls → member → speed

If this machine has joined no crew at that address, tls is the last step. Each step needs the steps before it, so the
first broken one is the cause, and its hint the remedy. Every step has a time limit. Nothing is sent before TLS shows
that the other end is the coordinator of this crew.
"""

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from cuadrilla.doctor.finding import Finding, Shell, fail, ok, warn
from cuadrilla.errors import LinkError
from cuadrilla.home import Joined
from cuadrilla.host.card import addresses
from cuadrilla.link.address import Address
from cuadrilla.link.identity import ANOTHER_PROGRAM, is_of_coordinator, key_hash, load_node, shown_certificate
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from cuadrilla.link.client import Connection

CONNECT_SECONDS = 5.0
MEASURE_SECONDS = 2.0
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
NUM_ROUND_TRIPS = 5
SLOW_BYTES_PER_SECOND = 25e6
MOVED = Message("it may have another address by now; its screen shows it: cuadrilla doctor THAT_ADDRESS")


def walk(address: Address, *, crew: Joined | None) -> Iterator[tuple[str, Finding]]:
    """(name, finding) of each step, as it is done. `crew`: the crew at `address`, if this machine has joined it."""
    step, command = "tcp", f"cuadrilla doctor --port {address.port}"
    shell: Shell = "coordinator"
    try:
        yield step, _tcp(address)
        step, command = "tls", "cuadrilla invite"
        if crew is None:
            yield step, _tls(address)
            return
        command, shell = f"cuadrilla join {address} --forget", "here"
        yield step, _tls_of(crew, address)
        step, command, shell = "member", "cuadrilla invite", "coordinator"
        with closing(_dial(address, crew)) as connection:
            yield step, _member(connection)
            step, command, shell = "speed", f"cuadrilla doctor {address}", "here"
            yield step, _speed(connection)
    except LinkError as error:
        yield step, fail(error.message, remedy=error.hint, command=command, shell=shell)


def _tcp(address: Address) -> Finding:
    try:
        with socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS) as plain:
            there, own = plain.getpeername()[0], plain.getsockname()[0]
    except OSError as error:
        raise _no_way(address, error) from None
    card = next((name for name, own_addresses in addresses().items() if own in own_addresses), "")
    return ok(Message("{address} answers at {place}, from {own} ({card})", address=address, place=there, own=own,
                      card=card))  # fmt: skip


def _no_way(address: Address, error: OSError) -> LinkError:
    if isinstance(error, ConnectionRefusedError):
        hint = "start the coordinator there (cuadrilla up RUN); {moved}. If not, compare the port that it prints"
        return LinkError("nothing listens at {address}", address=address, hint=hint, moved=MOVED)
    if isinstance(error, socket.gaierror):
        return LinkError(
            "no machine named {host} is known here ({reason})",
            host=address.host,
            reason=error.strerror,
            hint="give the coordinator's IP address: cuadrilla doctor 192.168.1.50:{port}",
            port=address.port,
        )
    silence = Message("no answer within {seconds:g} s", seconds=CONNECT_SECONDS)
    return LinkError(
        "cannot reach {address}: {reason}",
        address=address,
        reason=silence if isinstance(error, TimeoutError) else error.strerror or error,
        hint="{moved}. If not, check that both machines are on one network, and that the Wi-Fi does not isolate "
        "them (on a Mac: System Settings, Privacy & Security, Local Network, allow this terminal)"
        if error.errno in UNREACHABLE
        else "{moved}. If not, allow TCP port {port} in the firewall of the coordinator's machine",
        moved=MOVED,
        port=address.port,
    )


def _tls(address: Address) -> Finding:
    """Check that the other end is a coordinator of any crew."""
    if not is_of_coordinator(shown_certificate(address, timeout_seconds=CONNECT_SECONDS)):
        raise LinkError("what answers at {address} is no coordinator of cuadrilla", address=address,
                        hint=ANOTHER_PROGRAM)  # fmt: skip
    return ok(Message("a coordinator of cuadrilla; the rest is tested once this machine has joined"))


def _tls_of(crew: Joined, address: Address) -> Finding:
    """Check that the other end is the coordinator of this crew."""
    shown = shown_certificate(address, timeout_seconds=CONNECT_SECONDS)
    if key_hash(shown) != key_hash(load_node(crew.folder).certificate):
        raise LinkError(
            "what answers at {address} is not the coordinator of the crew that this machine has joined",
            address=address,
            hint="check the address; if the crew was recreated there, forget the old one and join with a new invite",
        )
    return ok(Message("the key belongs to this crew"))


def _dial(address: Address, crew: Joined) -> "Connection":
    try:
        from cuadrilla.link.client import Connection  # not before: it loads torch, which takes seconds
    except (ImportError, OSError) as error:
        raise LinkError("the calls need PyTorch: {reason}", reason=error, hint="see devices.torch above") from None
    return Connection(str(address), identity=load_node(crew.folder))


def _member(connection: "Connection") -> Finding:
    files = connection.describe().files
    megabytes = sum(file.num_bytes for file in files) / 1e6
    return ok(Message("admitted; files of the run: {count} ({megabytes:.1f} MB)", count=len(files),
                      megabytes=megabytes))  # fmt: skip


def _speed(connection: "Connection") -> Finding:
    trips = [_seconds(connection.check) for _ in range(NUM_ROUND_TRIPS)]
    down, up = _rate(connection.receive_for), _rate(connection.send_for)
    template = "{down:.1f} MB/s from there, {up:.1f} MB/s back, {milliseconds:.1f} ms for a round trip"
    cause = Message(template, down=down / 1e6, up=up / 1e6, milliseconds=1000 * min(trips))
    if min(down, up) >= SLOW_BYTES_PER_SECOND:
        return ok(cause)
    return warn(cause, remedy=Message("a cable is faster than Wi-Fi; what a crew gains over it: cuadrilla plan"))


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def _rate(measure: Callable[[float], int]) -> float:
    """Bytes per second."""
    began = time.monotonic()
    return measure(MEASURE_SECONDS) / max(time.monotonic() - began, 1e-9)
