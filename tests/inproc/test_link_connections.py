"""Connections of other programs, silent ones and those of kicked nodes: the server closes them, or they do no harm."""

import contextlib
import random
import socket
import time
from contextlib import closing, suppress
from functools import partial

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Contribution, Progress, Stop
from cuadrilla.link.client import Connection
from tests.hostile import HUNG_UP_SECONDS, MIB, PARAMETERS, SLACK_SECONDS, Crew, memory_stays
from tests.strangers import context, hello

# Connections of other programs


def is_hung_up(connection: socket.socket, *, seconds: float) -> bool:
    """Whether the other side ends the connection in time, whatever it sends before."""
    deadline = time.monotonic() + seconds
    try:
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(65536):
                return True
    except TimeoutError:
        return False
    except OSError:  # a reset, or a TLS alert
        return True
    return False


RANDOM = random.Random(49)
GREETINGS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: coordinator\r\n\r\n",
    "HTTP/2 without TLS": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
    "SSH": b"SSH-2.0-OpenSSH_9.7\r\n",
    "random": RANDOM.randbytes(4096),
    "a TLS record that is too long": bytes.fromhex("160301ffff") + RANDOM.randbytes(65535),
    "a hello that is too long": bytes.fromhex("1603014000" + "01ffffff") + RANDOM.randbytes(16380),
}


def test_other_protocols_are_hung_up_on(crew: Crew) -> None:
    lasting = []
    with memory_stays(64 * MIB):
        for name, greeting in GREETINGS.items():
            with socket.create_connection(("127.0.0.1", crew.port)) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(greeting)
                if not is_hung_up(connection, seconds=HUNG_UP_SECONDS + SLACK_SECONDS):
                    lasting.append(name)
            assert crew.works()
    assert lasting == []


def test_a_connection_that_says_nothing_does_not_last(crew: Crew) -> None:
    """Many connections at once: without a byte, with a part of a hello, with TLS and no HTTP/2. A worker is served."""
    first, tls = hello(), context()
    tls.set_alpn_protocols(["h2"])
    quiet: dict[str, socket.socket] = {}
    try:
        for name, said in {"nothing": b"", "one byte": first[:1], "half a hello": first[: len(first) // 2]}.items():
            quiet[name] = socket.create_connection(("127.0.0.1", crew.port))
            quiet[name].sendall(said)
        plain = socket.create_connection(("127.0.0.1", crew.port))
        quiet["TLS and no HTTP/2"] = tls.wrap_socket(plain)
        assert crew.works()
        began = time.monotonic()
        lasting = [
            name
            for name, connection in quiet.items()
            if not is_hung_up(connection, seconds=began + HUNG_UP_SECONDS + SLACK_SECONDS - time.monotonic())
        ]
        assert lasting == []
    finally:
        for connection in quiet.values():
            connection.close()


def test_another_address_while_it_runs(crew: Crew) -> None:
    """Members stay connected. Newcomers can use both addresses, since the old one may come back."""
    port = crew.server.serve("127.0.0.5:0")
    with closing(Connection(f"127.0.0.5:{port}", identity=crew.node("luis"))) as luis:
        assert luis.describe().config
    assert crew.works()


def test_the_last_word_is_heard_although_later_calls_fail(crew: Crew) -> None:
    """A worker in a pass may read the Stop only after the session has ended, and must not connect again then."""
    crew.server.send("ana", Stop(reason="SIGTERM received"))
    with suppress(LinkError):  # or the server does not read it any more
        crew.session.call(Contribution(lease_id=1, tokens=1, loss_sum=1.0, tensors=PARAMETERS))
    with pytest.raises(LinkError):
        crew.session.download(99)
    assert crew.session.final_stop() == Stop(reason="SIGTERM received")
    with pytest.raises(LinkError):
        crew.session.call(Progress(micro_steps=1))


def test_a_download_that_fails_ends_the_session(crew: Crew) -> None:
    """The other ranks of an island may wait in a collective, and rank 0 asks for the next event."""
    for fails in (partial(crew.session.download, 99), crew.session.next_event):
        with pytest.raises(LinkError, match="does not offer"):
            fails()


def test_a_session_that_breaks_has_no_last_word(crew: Crew) -> None:
    crew.ana.close()
    assert crew.session.final_stop() is None
