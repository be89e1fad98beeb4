"""What is no client of ours, and what is none any more: other protocols, silence, kicked nodes; closed or harmless."""

import contextlib
import random
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link import server as link_server
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Hello, Lease, Progress, Stop
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import SERVER_NAME
from tests.hostile import (
    CEILING_SECONDS,
    HUNG_UP_SECONDS,
    LAYOUT,
    MIB,
    PARAMETERS,
    SLACK_SECONDS,
    Crew,
    hello_bytes,
    memory_stays,
    wait_for,
)

# What is no client of ours: closed, or harmless


def tls_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def is_hung_up(connection: socket.socket, *, seconds: float) -> bool:
    """Whether the other side ends the connection in time; what it says before does not matter."""
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
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "4 GiB": b"\xff\xff\xff\xff" + RANDOM.randbytes(1000),
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
    """Nothing at all, a piece of a hello, TLS without a word of HTTP/2: all at once, and a worker is served."""
    hello = ssl.MemoryBIO()
    outgoing = tls_context().wrap_bio(ssl.MemoryBIO(), hello)
    with contextlib.suppress(ssl.SSLWantReadError):
        outgoing.do_handshake()
    first = hello.read()
    quiet: dict[str, socket.socket] = {}
    try:
        for name, said in {"nothing": b"", "one byte": first[:1], "half a hello": first[: len(first) // 2]}.items():
            quiet[name] = socket.create_connection(("127.0.0.1", crew.port))
            quiet[name].sendall(said)
        plain = socket.create_connection(("127.0.0.1", crew.port))
        quiet["TLS and no HTTP/2"] = tls_context().wrap_socket(plain)
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


def test_a_connection_without_a_call_is_closed(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 15 s, here after one; a session is a call, and a client connects again by itself."""
    monkeypatch.setattr(link_server, "IDLE_SECONDS", 1.0)
    port = crew.server.serve("127.0.0.1:0")
    address = f"127.0.0.1:{port}"
    with closing(Connection(address, identity=crew.node("luis"))) as luis, socket.socket() as plain:
        session = luis.session(parameters=[LAYOUT])
        session.call(Hello(speed_hint=1.0))
        assert isinstance(crew.heard.next("luis"), Hello)
        plain.connect(("127.0.0.1", port))
        with tls_context().wrap_socket(plain) as stranger:
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
            assert is_hung_up(stranger, seconds=CEILING_SECONDS)
        assert "luis" in crew.workers()
        session.close()
        wait_for(lambda: "luis" not in crew.workers())
        with closing(Connection(address, identity=crew.node("eva"))) as eva:
            assert eva.describe().config
            end = time.monotonic() + 2.5
            wait_for(lambda: time.monotonic() > end)
            assert eva.describe().config


# HTTP/2 by hand, with the token of a node (RFC 9113)

DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4
NO_WINDOW = bytes.fromhex("000400000000")  # SETTINGS_INITIAL_WINDOW_SIZE = 0: nothing may be sent to this client


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: str, value: str) -> bytes:
    """A header as HPACK writes it without a table and without Huffman codes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def grpc_message(message: bytes) -> bytes:
    return b"\x00" + len(message).to_bytes(4, "big") + message


class RawClient:
    """Somebody on a TLS connection; one writes frames and reads frames."""

    def __init__(self, crew: Crew, *, token: str = "", settings: bytes = b"") -> None:
        plain = socket.create_connection(("127.0.0.1", crew.port))
        plain.settimeout(CEILING_SECONDS)
        self.socket, self.token = tls_context().wrap_socket(plain), token
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, settings))

    def open(self, method: str, *, stream: int = 1) -> None:
        fields = {
            ":method": "POST",
            ":scheme": "https",
            ":path": f"/{wire.SERVICE}/{method}",
            ":authority": SERVER_NAME,
        }
        fields |= {"content-type": "application/grpc", "te": "trailers", wire.TOKEN_KEY: self.token}
        block = b"".join(field(name, value) for name, value in fields.items())
        self.socket.sendall(frame(HEADERS, block, flags=END_HEADERS, stream=stream))

    def send(self, payload: bytes, *, stream: int = 1) -> None:
        self.socket.sendall(frame(DATA, payload, stream=stream))

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def raw_client(crew: Crew, *, settings: bytes = b"") -> Iterator[RawClient]:
    made = RawClient(crew, token=crew.node("mala").token, settings=settings)
    try:
        yield made
    finally:
        made.close()


def test_http2_by_hand_reaches_the_coordinator(crew: Crew) -> None:
    """What follows means something: the same client says Hello and is heard."""
    with raw_client(crew) as client:
        client.open("Session")
        client.send(grpc_message(hello_bytes()))
        assert isinstance(crew.heard.next("mala"), Hello)


@pytest.mark.parametrize("address", ["127.0.0.5", "127.0.0.1"])
def test_another_address_while_it_runs(crew: Crew, address: str) -> None:
    """Those who are there stay; newcomers find it at either, since the old one may come back."""
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    crew.server.serve(f"{address}:{port}")
    with closing(Connection(f"{address}:{port}", identity=crew.node("luis"))) as luis:
        assert luis.describe().config
    with pytest.raises(LinkError, match="cannot listen on"):
        crew.server.serve(crew.address)
    assert crew.works()


def test_a_kicked_node_is_heard_no_more(crew: Crew) -> None:
    """It allows the coordinator no byte: its farewell can never be sent."""
    with raw_client(crew, settings=NO_WINDOW) as client:
        client.open("Session")
        client.send(grpc_message(hello_bytes()))
        assert isinstance(crew.heard.next("mala"), Hello)
        crew.server.send("mala", Lease(lease_id=1, version=0, units=(1,), planned_tokens=1))
        crew.nodes.remove("mala")
        crew.server.end_kicked()
        client.send(grpc_message(hello_bytes()))
        assert crew.workers() == ["ana"]
        assert crew.works()
        assert crew.heard.messages["mala"].empty()


def test_the_last_word_is_heard_although_later_calls_fail(crew: Crew) -> None:
    """A worker in the middle of a pass sees the Stop only after the session has ended; it must not try again."""
    crew.server.send("ana", Stop(reason="SIGTERM received"))
    with suppress(LinkError):  # or what it says is not read any more
        crew.session.call(Contribution(lease_id=1, tokens=1, loss_sum=1.0, tensors=PARAMETERS))
    assert crew.session.farewell() == Stop(reason="SIGTERM received")
    with pytest.raises(LinkError):
        crew.session.call(Progress(micro_steps=1))


def test_a_session_that_breaks_has_no_last_word(crew: Crew) -> None:
    crew.ana.close()
    assert crew.session.farewell() is None
