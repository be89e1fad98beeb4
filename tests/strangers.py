"""Strangers that connect to a crew's port in every way that needs no invite, a limited number of times."""

import contextlib
import itertools
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

Knock = Callable[[socket.socket], None]
LOOPBACK = tuple(f"127.0.0.{number}" for number in range(2, 202))


def hello() -> bytes:
    """The first message of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context().wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def context() -> ssl.SSLContext:
    """TLS that accepts any certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def closes(_connection: socket.socket) -> None:
    """Connect and close."""


def half(connection: socket.socket) -> None:
    connection.sendall(hello()[: random.randrange(1, 200)])


def drips(connection: socket.socket) -> None:
    """A TLS handshake that comes byte by byte and never ends."""
    for byte in hello()[:40]:
        connection.sendall(bytes([byte]))


def rubbish(connection: socket.socket) -> None:
    connection.sendall(random.randbytes(2000))


def resets(connection: socket.socket) -> None:
    connection.sendall(hello())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


KNOCKS: tuple[Knock, ...] = (closes, closes, closes, half, drips, rubbish, resets)


def knock(port: int, *, times: int, seed: int, source: str) -> None:
    """Connect again and again, as fast as possible, in randomly chosen ways. A refused connection does not stop it."""
    chance = random.Random(seed)
    for _ in range(times):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 5.0, (source, 0)) as connection,
        ):
            chance.choice(KNOCKS)(connection)


@contextlib.contextmanager
def siege(port: int, *, times: int) -> Iterator[None]:
    """Four clients that knock at once, each from its own address. The block ends when they have ended."""
    threads = [
        threading.Thread(
            target=knock, args=(port,), kwargs={"times": times, "seed": n, "source": LOOPBACK[n]}, daemon=True
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def idle(port: int, *, number: int) -> list[socket.socket]:
    """Connections that complete the TLS handshake and then send nothing."""
    tls, made = context(), list[socket.socket]()
    for _, source in zip(range(number), itertools.cycle(LOOPBACK), strict=False):
        connection = tls.wrap_socket(socket.socket())  # wrapped unconnected, so that a failure can close it
        connection.settimeout(5.0)
        try:
            connection.bind((source, 0))
            connection.connect(("127.0.0.1", port))
        except OSError:
            connection.close()
        else:
            made.append(connection)
    return made
