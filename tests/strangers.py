"""Strangers who knock at a crew's port in every way that needs no invite, each a bounded number of times."""

import contextlib
import itertools
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cuadrilla.link.tls import enrol_identity

Knock = Callable[[socket.socket], None]
LOOPBACK = tuple(f"127.0.0.{number}" for number in range(2, 202))


def hello() -> bytes:
    """The first message of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context().wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def context(folder: Path | None = None) -> ssl.SSLContext:
    """TLS that trusts anybody, with the key of `folder`/stranger.{key,pem} if there is one."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if folder is not None:
        made.load_cert_chain(folder / "stranger.pem", folder / "stranger.key")
    return made


def with_the_enrol_key(folder: Path) -> Path:
    """The published certificate, which gets through TLS."""
    identity = enrol_identity(b"")
    (folder / "stranger.pem").write_bytes(identity.certificate)
    (folder / "stranger.key").write_bytes(identity.key)
    return folder


def closes(_connection: socket.socket) -> None:
    """Connect and close."""


def half(connection: socket.socket) -> None:
    connection.sendall(hello()[: random.randrange(1, 200)])


def drips(connection: socket.socket) -> None:
    """A byte at a time: a TLS that never gets anywhere."""
    for byte in hello()[:40]:
        connection.sendall(bytes([byte]))


def rubbish(connection: socket.socket) -> None:
    connection.sendall(random.randbytes(2000))


def resets(connection: socket.socket) -> None:
    connection.sendall(hello())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


KNOCKS: tuple[Knock, ...] = (closes, closes, closes, half, drips, rubbish, resets)


def knock(port: int, *, times: int, seed: int, host: str = "127.0.0.1", source: str = "127.0.0.1") -> None:
    """One after the other, as fast as they go; being refused is no end."""
    chance = random.Random(seed)
    for _ in range(times):
        with contextlib.suppress(OSError), socket.create_connection((host, port), 5.0, (source, 0)) as connection:
            chance.choice(KNOCKS)(connection)


@contextlib.contextmanager
def siege(port: int, *, times: int, clients: int = 4, source: str = "127.0.0.{}") -> Iterator[list[threading.Thread]]:
    """That many clients at once, each from an address of its own; ended with the block."""
    threads = [
        threading.Thread(
            target=knock, args=(port,), kwargs={"times": times, "seed": n, "source": source.format(n + 2)}, daemon=True
        )
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join()


def idle(
    port: int, *, number: int, folder: Path, host: str = "127.0.0.1", sources: Sequence[str] = LOOPBACK
) -> list[socket.socket]:
    """Connections that are through TLS, with the key of `folder`, and say nothing more."""
    tls = context(folder)
    # Made before it is connected: one that fails in between has an owner who closes it.
    return list(_each(port, number=number, host=host, sources=sources, make=lambda: tls.wrap_socket(socket.socket())))


def half_open(port: int, *, number: int, host: str, sources: Sequence[str]) -> list[socket.socket]:
    """Connections that have sent a part of their first message, and wait."""
    connections = list(_each(port, number=number, host=host, sources=sources, make=socket.socket))
    for connection in connections:
        with contextlib.suppress(OSError):
            half(connection)
    return connections


def _each(
    port: int, *, number: int, host: str, sources: Sequence[str], make: Callable[[], socket.socket]
) -> Iterator[socket.socket]:
    for _, source in zip(range(number), itertools.cycle(sources), strict=False):
        connection = make()
        connection.settimeout(5.0)
        try:
            connection.bind((source, 0))
            connection.connect((host, port))
        except OSError:
            connection.close()
        else:
            yield connection
