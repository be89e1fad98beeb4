"""What is no client of ours, and what is none any more: other protocols, broken HTTP/2, floods; closed or harmless."""

import contextlib
import random
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.engines.enrol import enrol
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.address import Address
from cuadrilla.link.base import Contribution, Hello, Lease, Stop
from cuadrilla.link.grpc_calls import MAX_CALLS_OF_AN_ADDRESS
from cuadrilla.link.grpc_client import SERVICE
from cuadrilla.link.invite import Invite, hash_secret, new_secret
from cuadrilla.link.tls import SERVER_NAME, enrol_identity, key_hash, node_request
from tests import strangers
from tests.hostile import (
    CEILING_SECONDS,
    HUNG_UP_SECONDS,
    MIB,
    PARAMETERS,
    SLACK_SECONDS,
    Abuser,
    Crew,
    hello_bytes,
    memory_stays,
    wait_for,
)

# What is no client of ours: closed, or harmless


def tls_context(*, node: Path | None = None, highest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = highest
    context.set_alpn_protocols(["h2"])
    if node is not None:
        context.load_cert_chain(node / "node.pem", node / "node.key")
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
    crew.node("mala")
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
        quiet["TLS and no HTTP/2"] = tls_context(node=crew.folder / "mala").wrap_socket(plain)
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


@pytest.mark.parametrize("highest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_without_a_certificate_is_refused(crew: Crew, highest: ssl.TLSVersion) -> None:
    with socket.create_connection(("127.0.0.1", crew.port)) as plain:
        plain.settimeout(CEILING_SECONDS)
        said = b""
        with contextlib.suppress(OSError), tls_context(highest=highest).wrap_socket(plain) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
            said = connection.recv(65536)  # TLS 1.3: the refusal comes after the handshake
        assert said == b""
    assert crew.works()


def test_a_node_with_an_older_tls_is_refused(crew: Crew) -> None:
    crew.node("vieja")
    context = tls_context(node=crew.folder / "vieja", highest=ssl.TLSVersion.TLSv1_2)
    with socket.create_connection(("127.0.0.1", crew.port)) as plain:
        plain.settimeout(CEILING_SECONDS)
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(plain)
    assert crew.works()


# HTTP/2 by hand, inside the TLS session of a node (RFC 9113)

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
ACK, END_HEADERS = 1, 4
NO_WINDOW = bytes.fromhex("000400000000")  # SETTINGS_INITIAL_WINDOW_SIZE = 0: nothing may be sent to this client


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: str, value: str) -> bytes:
    """A header as HPACK writes it without a table and without Huffman codes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def grpc_message(message: bytes, *, length: int | None = None) -> bytes:
    return b"\x00" + (len(message) if length is None else length).to_bytes(4, "big") + message


class RawClient:
    """Somebody on a TLS connection, from any address of this machine; one writes frames and reads frames."""

    def __init__(self, crew: Crew, context: ssl.SSLContext, *, host: str = "127.0.0.1", settings: bytes = b"") -> None:
        plain = socket.create_connection(("127.0.0.1", crew.port), source_address=(host, 0))
        plain.settimeout(CEILING_SECONDS)
        self.socket = context.wrap_socket(plain)
        self.buffer = b""
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, settings))

    def open(self, method: str, *, stream: int = 1) -> None:
        fields = {":method": "POST", ":scheme": "https", ":path": SERVICE + method, ":authority": SERVER_NAME}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        block = b"".join(field(name, value) for name, value in fields.items())
        self.socket.sendall(frame(HEADERS, block, flags=END_HEADERS, stream=stream))

    def send(self, payload: bytes, *, stream: int = 1) -> None:
        self.socket.sendall(frame(DATA, payload, stream=stream))

    def next(self) -> tuple[int, int, bytes]:
        """Kind, flags and payload of the next frame. Raises OSError when the connection ends."""
        while len(self.buffer) < 9 or len(self.buffer) < 9 + int.from_bytes(self.buffer[:3], "big"):
            read = self.socket.recv(65536)
            if not read:
                raise ConnectionError("ended")
            self.buffer += read
        length, kind, flags = int.from_bytes(self.buffer[:3], "big"), self.buffer[3], self.buffer[4]
        payload, self.buffer = self.buffer[9 : 9 + length], self.buffer[9 + length :]
        return kind, flags, payload

    def is_cut_off(self) -> bool:
        """Whether the stream or the connection is ended by the other side."""
        try:
            while True:
                kind, flags, payload = self.next()
                if kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & 1):
                    return True
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self.socket.sendall(frame(kind, payload if kind == PING else b"", flags=ACK))
        except TimeoutError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def raw_client(crew: Crew, *, settings: bytes = b"") -> Iterator[RawClient]:
    crew.node("mala")
    made = RawClient(crew, tls_context(node=crew.folder / "mala"), settings=settings)
    try:
        yield made
    finally:
        made.close()


def test_http2_by_hand_reaches_the_coordinator(crew: Crew) -> None:
    """The attacks below mean something: the same client says Hello and is heard."""
    with raw_client(crew) as client:
        client.open("Session")
        client.send(grpc_message(hello_bytes()))
        assert isinstance(crew.heard.next("mala"), Hello)


@pytest.mark.skipif(sys.platform == "darwin", reason="127.0.0.2 is no address of this machine")
def test_idle_enrolments_do_not_keep_a_newcomer_out(crew: Crew, tmp_path: Path) -> None:
    secret = new_secret()
    crew.server.adopt_invites({hash_secret(secret): 1})
    context = strangers.context(strangers.with_the_enrol_key(tmp_path))
    context.set_alpn_protocols(["h2"])
    idle = [RawClient(crew, context, host="127.0.0.2") for _ in range(12)]
    try:
        for stranger in idle:
            stranger.open("Enroll")
        request = node_request(crew.folder / "berta", name="berta")
        newcomer = Abuser(crew, enrol_identity(crew.keys.identity.certificate))
        try:
            message = pb.EnrolRequest(secret=secret, certificate_request=request)
            assert newcomer.status("Enroll", [message]) == "OK"
        finally:
            newcomer.close()
    finally:
        for stranger in idle:
            stranger.close()


def test_a_newcomer_waits_for_its_turn_behind_others_at_its_address(crew: Crew, tmp_path: Path) -> None:
    secret, said = new_secret(), list[str]()
    crew.server.adopt_invites({hash_secret(secret): 1})
    context = strangers.context(strangers.with_the_enrol_key(tmp_path))
    context.set_alpn_protocols(["h2"])
    others = [RawClient(crew, context) for _ in range(MAX_CALLS_OF_AN_ADDRESS)]
    for other in others:
        other.open("Enroll")
    wait_for(lambda: crew.server._admission._calls["@127.0.0.1"] == MAX_CALLS_OF_AN_ADDRESS)
    leaving = threading.Timer(2.0, lambda: [other.close() for other in others])
    leaving.start()
    hash_ = key_hash(crew.keys.identity.certificate)
    invite = Invite(address=Address("127.0.0.1", crew.port), key_hash=hash_, secret=secret)
    assert enrol(Home(tmp_path / "home"), str(invite), address="", name="berta", report=said.append).name == "berta"
    assert any("waiting" in line for line in said)
    leaving.join()


@pytest.mark.parametrize("method", ["Session", "Upload", "Describe", "Enroll"])
def test_a_message_of_4_gib_is_refused_by_its_length(crew: Crew, method: str) -> None:
    with raw_client(crew) as client, memory_stays(64 * MIB):
        client.open(method)
        client.send(grpc_message(bytes(1000), length=2**32 - 1))
        assert client.is_cut_off()
        assert crew.works()


FRAMES = {
    "a frame of 16 MiB": b"\xff\xff\xff" + bytes([DATA, 0]) + (1).to_bytes(4, "big") + bytes(16384),
    "headers that are no headers": frame(HEADERS, b"\xff" * 200, flags=END_HEADERS, stream=1),
    "settings of an odd length": frame(SETTINGS, b"abcde"),
    "a continuation of nothing": frame(CONTINUATION, bytes(100), stream=1),
    "random frames": b"".join(
        frame(RANDOM.randrange(12), RANDOM.randbytes(50), flags=RANDOM.randrange(256), stream=RANDOM.randrange(9))
        for _ in range(300)
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_broken_frames_end_the_connection(crew: Crew, name: str) -> None:
    with raw_client(crew) as client, memory_stays(64 * MIB):
        with contextlib.suppress(OSError):
            client.socket.sendall(FRAMES[name])
        assert client.is_cut_off()
        assert crew.works()


def test_frames_that_mean_nothing_are_harmless(crew: Crew) -> None:
    with raw_client(crew) as client, memory_stays(64 * MIB):
        with contextlib.suppress(OSError):
            client.socket.sendall(frame(DATA, bytes(100), stream=5))
            client.socket.sendall(frame(HEADERS, field(":path", "/x"), flags=END_HEADERS, stream=2))
        assert crew.works()


@pytest.mark.parametrize("opening", ["pings", "settings", "continuations", "resets"])
def test_floods_of_frames_do_not_stop_the_others(crew: Crew, opening: str) -> None:
    """Ten thousand small frames that each ask for an answer or for memory."""
    block = field("x-filler", "x" * 100)
    flood = {
        "pings": frame(PING, bytes(8)) * 10_000,
        "settings": frame(SETTINGS) * 10_000,
        "continuations": frame(HEADERS, block, stream=1) + frame(CONTINUATION, block * 10, stream=1) * 2_000,
        "resets": b"".join(
            frame(HEADERS, field(":path", "/x"), flags=END_HEADERS, stream=stream)
            + frame(RST_STREAM, (8).to_bytes(4, "big"), stream=stream)
            for stream in range(1, 4_001, 2)
        ),
    }
    with raw_client(crew) as client, memory_stays(96 * MIB):
        client.socket.settimeout(2.0)  # an answer that is not read may block us: that is our problem alone
        with contextlib.suppress(OSError):
            client.socket.sendall(flood[opening])
        assert crew.works()


def test_a_kicked_node_that_reads_nothing_is_cut_off(crew: Crew) -> None:
    """It allows the coordinator no byte: its farewell can never be sent."""
    with raw_client(crew, settings=NO_WINDOW) as client:
        client.open("Session")
        client.send(grpc_message(hello_bytes()))
        assert isinstance(crew.heard.next("mala"), Hello)
        crew.server.send("mala", Lease(lease_id=1, version=0, units=(1,), planned_tokens=1))
        crew.nodes.remove("mala")
        crew.server.end_kicked()
        client.send(grpc_message(hello_bytes()))
        client.socket.settimeout(HUNG_UP_SECONDS)
        assert client.is_cut_off()
        assert crew.server.workers() == ["ana"]
        assert crew.heard.messages["mala"].empty()
        assert crew.works()


def test_a_kicked_node_is_heard_no_more(crew: Crew) -> None:
    """From the moment of `end_kicked` on, whether or not its session could be closed yet."""
    with raw_client(crew, settings=NO_WINDOW) as client:
        client.open("Session")
        client.send(grpc_message(hello_bytes()))
        assert isinstance(crew.heard.next("mala"), Hello)
        crew.server.send("mala", Lease(lease_id=1, version=0, units=(1,), planned_tokens=1))
        crew.nodes.remove("mala")
        crew.server.end_kicked()
        assert crew.server.workers() == ["ana"]


def test_the_last_word_is_heard_although_later_calls_fail(crew: Crew) -> None:
    """A worker in the middle of a pass sees the Stop only after the session has ended; it must not try again."""
    crew.server.send("ana", Stop(reason="SIGTERM received"))
    with pytest.raises(LinkError):
        crew.session.call(Contribution(lease_id=1, tokens=1, loss_sum=1.0, tensors=PARAMETERS))
    assert crew.session.farewell() == Stop(reason="SIGTERM received")


def test_a_session_that_breaks_has_no_last_word(crew: Crew) -> None:
    crew.ana.close()
    assert crew.session.farewell() is None
