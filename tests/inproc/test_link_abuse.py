"""Abuse of the crew link over real sockets on the loopback: strangers, broken clients, nodes that turned bad.

Whatever one of them does, the coordinator stays up, its memory stays bounded, and an honest worker is served meanwhile.
`Abuser` is a node that speaks gRPC with bytes of its own choice, `RawClient` one that speaks HTTP/2 by hand.
"""

import contextlib
import gc
import logging
import queue
import random
import socket
import ssl
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError

from cuadrilla.engines.local import WrapLink
from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import Contribute, Goodbye, Hello, Lease, Stop, ToCoordinator, ToWorker, Version
from cuadrilla.link.grpc_client import SERVICE, Connection, Refused
from cuadrilla.link.grpc_server import CrewDesk, Offer
from cuadrilla.link.invite import MAX_WRONG_TRIES, hash_secret, new_secret
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import SERVER_NAME, Identity, enrol_identity, node_request, open_coordinator
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.train.coordinate import Coordination, Outcome
from cuadrilla.train.loop import environment
from cuadrilla.train.setup import Parts
from tests.crews import join, pem_of
from tests.doors import _Crew
from tests.faults import Script, play
from tests.runs import execute, final_sha256, prepare, workers
from tests.tasks import RaggedRegression

MIB = 2**20
CEILING_SECONDS = 20.0  # for what happens at once unless something is broken
HUNG_UP_SECONDS = 5.0  # how long a connection that says nothing useful may last
SLACK_SECONDS = 5.0
PARAMETERS = {"bias": torch.arange(3.0), "weight": torch.arange(8.0).view(2, 4)}
LAYOUT = wire.Layout.of(PARAMETERS)
BIG = wire.Layout((("weight", torch.float32, (4, MIB)),))  # 16 MiB
HUGE = 2**64 - 1


class Heard:
    """A receiver that keeps what it is told, by worker."""

    def __init__(self) -> None:
        self.messages: defaultdict[str, queue.SimpleQueue[ToCoordinator]] = defaultdict(queue.SimpleQueue)
        self.goodbyes: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def deliver(self, worker: str, message: ToCoordinator) -> None:
        self.messages[worker].put(message)

    def heard(self, worker: str, passes: int) -> None:
        pass

    def left(self, worker: str, reason: str) -> None:
        self.goodbyes.put((worker, reason))

    def next(self, worker: str) -> ToCoordinator:
        return self.messages[worker].get(timeout=CEILING_SECONDS)


class Crew:
    """A desk that serves, its keys, and an honest worker `ana` that has joined."""

    def __init__(self, folder: Path, *, contribution: wire.Layout = LAYOUT) -> None:
        self.folder = folder
        self.keys = open_coordinator(folder / "crew", now=datetime.now(UTC))
        self.nodes = AllowList(folder / "crew" / "nodes.json")
        self.heard = Heard()
        file = folder / "file.bin"
        file.write_bytes(b"shard" * 100)
        self.desk = CrewDesk(
            keys=self.keys,
            nodes=self.nodes,
            receiver=self.heard,
            offer=Offer(config="{}", files={"file.bin": (file, b"f" * 32)}),
            parameters=LAYOUT,
            contribution=contribution,
        )
        self.port = self.desk.serve("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self.leases = 0
        self.ana = Connection(self.address, identity=self.node("ana"))
        self.session = self.ana.session(parameters=LAYOUT)
        self.session.call(Hello(speed_hint=1.0))
        assert isinstance(self.heard.next("ana"), Hello)

    def node(self, name: str) -> Identity:
        identity = join(self.folder / name, name=name, crew=self.keys)
        self.nodes.add(name, certificate=identity.certificate)
        return identity

    def works(self) -> bool:
        """The honest worker gets a lease and a version, uploads and answers, and the answer is what it sent."""
        self.leases += 1
        lease = Lease(lease_id=self.leases, version=self.leases, units=(1, 2), planned_tokens=9)
        self.desk.send("ana", lease)
        assert self.session.next_event() == lease
        self.desk.send("ana", Version(version=self.leases, parameters=PARAMETERS))
        version = self.session.next_event()
        assert isinstance(version, Version)
        got = self.session.download(version.parameters)
        assert all(torch.equal(got[name], PARAMETERS[name]) for name in PARAMETERS)
        layout = self.desk._contribution
        sent = layout.unpack(bytearray(random.Random(self.leases).randbytes(layout.num_bytes)))
        answer = Contribute(
            lease_id=self.leases, tokens=5, loss_sum=1.5, seconds=0.25, tensors=self.session.upload(sent)
        )
        self.session.call(answer)
        heard = self.heard.next("ana")
        assert isinstance(heard, Contribute)
        assert heard.lease_id == self.leases
        assert heard.valid
        assert isinstance(heard.tensors, dict)
        return all(torch.equal(heard.tensors[name].view(torch.int32), sent[name].view(torch.int32)) for name in sent)

    def close(self) -> None:
        self.session.close()
        self.ana.close()
        closing = threading.Thread(target=self.desk.close, name="closes the desk", daemon=True)
        closing.start()
        closing.join(CEILING_SECONDS)
        assert not closing.is_alive(), "the coordinator cannot end"


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path)
    yield made
    made.close()


@pytest.fixture
def big_crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path, contribution=BIG)
    yield made
    made.close()


class Abuser:
    """A client of the link with an identity of its own that sends whatever bytes it is given."""

    def __init__(self, crew: Crew, identity: Identity | None, *, ca: bytes = b"") -> None:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=ca or crew.keys.identity.ca,
            private_key=identity.key if identity else None,
            certificate_chain=identity.certificate if identity else None,
        )
        options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(crew.address, credentials, options=[*options, ("grpc.enable_retries", 0)])

    def stream(self, method: str, requests: Iterable[bytes]) -> Any:
        """A call of any method, with as many messages as one likes."""
        return self.channel.stream_stream(SERVICE + method)(iter(requests), timeout=4 * CEILING_SECONDS)

    def status(self, method: str, requests: Iterable[Any]) -> str:
        """How the call ends, once it has."""
        raw = (item if isinstance(item, bytes) else item.SerializeToString() for item in requests)
        call = self.stream(method, raw)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        name: str = call.code().name
        return name

    def say(self, *messages: pb.ToCoordinator | bytes) -> list[pb.ToWorker]:
        """A session in which this is said; what came back until it ended."""
        raw = [item if isinstance(item, bytes) else item.SerializeToString() for item in messages]
        answers = []
        with contextlib.suppress(grpc.RpcError):
            for answer in self.stream("Session", raw):
                answers.append(pb.ToWorker.FromString(answer))
        return answers

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def abuser(crew: Crew, identity: Identity | None) -> Iterator[Abuser]:
    made = Abuser(crew, identity)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def memory_stays(limit_bytes: int) -> Iterator[None]:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss - before < limit_bytes


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CEILING_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


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
    """A node on a TLS connection; one writes frames and reads frames."""

    def __init__(self, crew: Crew, name: str, *, settings: bytes = b"") -> None:
        plain = socket.create_connection(("127.0.0.1", crew.port))
        plain.settimeout(CEILING_SECONDS)
        self.socket = tls_context(node=crew.folder / name).wrap_socket(plain)
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
    made = RawClient(crew, "mala", settings=settings)
    try:
        yield made
    finally:
        made.close()


def hello_bytes() -> bytes:
    raw: bytes = wire.to_coordinator(Hello(speed_hint=1.0)).SerializeToString()
    return raw


def test_http2_by_hand_reaches_the_coordinator(crew: Crew) -> None:
    """The attacks below mean something: the same client says Hello and is heard."""
    with raw_client(crew) as client:
        client.open("Session")
        client.send(grpc_message(hello_bytes()))
        assert isinstance(crew.heard.next("mala"), Hello)


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
        crew.desk.send("mala", Lease(lease_id=1, version=0, units=(1,), planned_tokens=1))
        crew.nodes.remove("mala")
        crew.desk.end_kicked()
        client.send(grpc_message(hello_bytes()))
        client.socket.settimeout(HUNG_UP_SECONDS)
        assert client.is_cut_off()
        assert crew.desk.workers() == ["ana"]
        assert crew.heard.messages["mala"].empty()
        assert crew.works()


def test_a_kicked_node_is_heard_no_more(crew: Crew) -> None:
    """From the moment of `end_kicked` on, whether or not its session could be closed yet."""
    with raw_client(crew, settings=NO_WINDOW) as client:
        client.open("Session")
        client.send(grpc_message(hello_bytes()))
        assert isinstance(crew.heard.next("mala"), Hello)
        crew.desk.send("mala", Lease(lease_id=1, version=0, units=(1,), planned_tokens=1))
        crew.nodes.remove("mala")
        crew.desk.end_kicked()
        assert crew.desk.workers() == ["ana"]


# Who may call what

LET_IN = {"Describe": "OK", "Session": "OK", "Upload": "FAILED_PRECONDITION", "Download": "NOT_FOUND"}
LET_IN |= {"Check": "OK", "Receive": "OK", "Send": "OK", "Average": "INVALID_ARGUMENT"}
"""What a listed node without a session gets: the method itself answers."""


def certificate_for(name: str, crew: Crew, *, begins: timedelta, ends: timedelta, own: bool = False) -> Identity:
    """Signed by the crew's CA, or by a key that only calls itself so."""
    ca, now = x509.load_pem_x509_certificate(crew.keys.identity.ca), datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .sign(key if own else crew.keys.ca_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    crew.nodes.add(name, certificate=pem)
    return Identity(key=pem_of(key), certificate=pem, ca=crew.keys.identity.ca)


def caller(kind: str, crew: Crew) -> Identity | None:
    day = timedelta(days=1)
    match kind:
        case "node":
            return crew.node("luis")
        case "kicked":
            identity = crew.node("luis")
            crew.nodes.remove("luis")
            return identity
        case "never let in":
            return join(crew.folder / "luis", name="luis", crew=crew.keys)
        case "of another crew":
            other = open_coordinator(crew.folder / "other", now=datetime.now(UTC))
            identity = join(crew.folder / "luis", name="luis", crew=other)
            crew.nodes.add("luis", certificate=identity.certificate)
            return identity
        case "expired":
            return certificate_for("luis", crew, begins=-2 * day, ends=-day)
        case "not yet valid":
            return certificate_for("luis", crew, begins=day, ends=2 * day)
        case "self-made":
            return certificate_for("luis", crew, begins=-day, ends=day, own=True)
        case "enrol":
            return enrol_identity(crew.keys.identity.certificate)
    return None


REFUSED = "PERMISSION_DENIED"
NO_TLS = "UNAVAILABLE"  # the handshake fails: no method is reached


@pytest.mark.parametrize(
    ("kind", "enroll", "others"),
    [
        ("node", REFUSED, None),
        ("enrol", "OK", REFUSED),
        ("kicked", REFUSED, REFUSED),
        ("never let in", REFUSED, REFUSED),
        ("of another crew", NO_TLS, NO_TLS),
        ("expired", NO_TLS, NO_TLS),
        ("not yet valid", NO_TLS, NO_TLS),
        ("self-made", NO_TLS, NO_TLS),
        ("nobody", NO_TLS, NO_TLS),
    ],
)
def test_who_may_call_what(crew: Crew, kind: str, enroll: str, others: str | None) -> None:
    """Each with the right secret of an open invite in its hand; being in the allow-list does not help a forger."""
    secret = new_secret()
    crew.desk.adopt_invites({hash_secret(secret): 5})
    request = node_request(crew.folder / "berta", name="berta")
    with abuser(crew, caller(kind, crew)) as client:
        got = {
            method: client.status(method, [] if method in ("Session", "Upload", "Send") else [b""]) for method in LET_IN
        }
        assert got == {method: others or LET_IN[method] for method in LET_IN}
        message = pb.EnrolRequest(secret=secret, certificate_request=request)
        assert client.status("Enroll", [message]) == enroll
    assert ("berta" in crew.nodes.nodes()) == (enroll == "OK")
    assert crew.works()


def test_methods_that_do_not_exist(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client:
        for method in ("", "Shell", "session", "../Session", "x" * 4000):
            assert client.status(method, [b""]) == "UNIMPLEMENTED"


# Guessing invites


def test_guesses_close_every_invite(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    """300 over the network; ten thousand against the state machine are in test_invite.py."""
    secret = new_secret()
    crew.desk.adopt_invites({hash_secret(secret): 5})
    stranger = enrol_identity(crew.keys.identity.certificate)
    connection = Connection(crew.address, identity=stranger)
    request = node_request(crew.folder / "berta", name="berta")
    reasons = []
    with caplog.at_level(logging.WARNING, logger="cuadrilla"):
        for guess in range(300):
            with pytest.raises(Refused) as caught:
                connection.enroll(secret=guess.to_bytes(20, "big"), request=request)
            reasons.append(caught.value.message)
        with pytest.raises(Refused, match="closed after wrong tries"):
            connection.enroll(secret=secret, request=request)
    connection.close()
    assert set(reasons) == {"the coordinator refused: the secret is not one of this crew"}
    assert any("all invites are closed" in record.message for record in caplog.records)
    assert list(crew.nodes.nodes()) == ["ana"]
    closed = Connection(crew.address, identity=stranger)
    with pytest.raises(Refused, match="lets nobody in now"):
        closed.enroll(secret=secret, request=request)
    closed.close()
    assert crew.works()


def test_guesses_do_not_fill_the_log(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    """After the invites are closed a guess is no news any more."""
    crew.desk.adopt_invites({hash_secret(new_secret()): 1})
    connection = Connection(crew.address, identity=enrol_identity(crew.keys.identity.certificate))
    request = node_request(crew.folder / "berta", name="berta")
    with caplog.at_level(logging.WARNING, logger="cuadrilla"):
        for guess in range(100):
            with pytest.raises(Refused):
                connection.enroll(secret=guess.to_bytes(20, "big"), request=request)
    connection.close()
    assert len(caplog.records) <= 4 * MAX_WRONG_TRIES


HOSTILE_ENROLMENTS = {
    "nothing": pb.EnrolRequest(),
    "a request of 3 MiB": pb.EnrolRequest(certificate_request=b"-----BEGIN" + b"A" * 3 * MIB),
    "a secret of 3 MiB": pb.EnrolRequest(secret=b"s" * 3 * MIB),
    "noise": b"\xff" * 1000,
    "5 MiB": pb.EnrolRequest(secret=b"s" * 5 * MIB),
}


def test_hostile_enrolments(crew: Crew) -> None:
    crew.desk.adopt_invites({hash_secret(new_secret()): 1})
    with abuser(crew, enrol_identity(crew.keys.identity.certificate)) as client:
        got = {name: client.status("Enroll", [message]) for name, message in HOSTILE_ENROLMENTS.items()}
    assert set(got.values()) <= {REFUSED, "INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED"}
    assert list(crew.nodes.nodes()) == ["ana"]
    assert crew.works()


# Ten thousand frames for whoever reads them: an error of ours, or a message that means something

SEEDS = {
    pb.ToCoordinator: [
        pb.ToCoordinator(hello=pb.Hello(protocol=1, speed_hint=1.0, environment={"torch": "2.10"})),
        pb.ToCoordinator(progress=pb.Progress(passes=7)),
        pb.ToCoordinator(contribute=pb.Contribute(lease_id=3, tokens=5, loss_sum=1.0, seconds=0.5, upload="u")),
        pb.ToCoordinator(goodbye=pb.Goodbye(reason="done")),
    ],
    pb.ToWorker: [
        pb.ToWorker(version=pb.Version(version=4, parameters="version-4")),
        pb.ToWorker(lease=pb.Lease(lease_id=3, version=4, units=[1, 2, 300], planned_tokens=9)),
        pb.ToWorker(stop=pb.Stop(reason="the run has ended", refused=True)),
    ],
    pb.Chunk: list(wire.chunks("u", LAYOUT.pack(PARAMETERS), layout=LAYOUT)),
    pb.EnrolRequest: [pb.EnrolRequest(secret=b"s" * 20, certificate_request=b"-----BEGIN")],
    pb.DownloadRequest: [pb.DownloadRequest(name="version-1", offset=9)],
}
NUM_FRAMES = 10_000


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """A message with a few bytes changed, taken out, doubled or put in; now and then plain noise."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(60))
    changed = bytearray(raw)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 | 1:
                changed[at : at + 1] = chance.randbytes(1)
            case 2:
                del changed[at : at + chance.randrange(1, 9)]
            case 3:
                changed[at:at] = changed[chance.randrange(len(changed) + 1) :][:20]
            case _:
                changed[at:at] = b"\xff" * chance.randrange(1, 11)
    return bytes(changed)


def test_ten_thousand_frames_raise_nothing_but_our_errors() -> None:
    chance = random.Random(2026)
    parsed = unparsed = 0
    for _ in range(NUM_FRAMES):
        kind = chance.choice(list(SEEDS))
        raw = mutated(chance.choice(SEEDS[kind]).SerializeToString(), chance)
        try:
            message = kind.FromString(raw)
        except DecodeError:
            unparsed += 1
            continue
        parsed += 1
        with contextlib.suppress(LinkError):
            check_read(kind, message)
    assert min(parsed, unparsed) > NUM_FRAMES / 10


def check_read(kind: Any, message: Any) -> None:
    """What came through is what the rest of the program may rely on."""
    if kind is pb.ToCoordinator:
        uploads = wire.Uploads()
        uploads.put("u", PARAMETERS)
        match wire.from_worker(message, uploads=uploads):
            case Hello(speed_hint=hint):
                assert 0 < hint < 1e12
            case Contribute() as answer:
                assert answer.seconds > 0
                assert not answer.valid or answer.tensors is PARAMETERS
                assert not answer.valid or abs(answer.loss_sum) < float("inf")
    elif kind is pb.ToWorker:
        event = wire.from_coordinator(message)
        assert not isinstance(event, Lease) or (event.units and event.planned_tokens > 0)
    elif kind is pb.Chunk:
        assembly = wire.Assembly(LAYOUT.num_bytes, layout=LAYOUT)
        assembly.add(message)
        assembly.add(message)
        assert len(assembly.buffer) == LAYOUT.num_bytes


def to(**kind: Any) -> pb.ToCoordinator:
    return pb.ToCoordinator(**kind)


HELLO = to(hello=pb.Hello(protocol=1, speed_hint=1.0))
ENDED_BY = {
    "nothing": pb.ToCoordinator(),
    "an unknown kind": b"\xfa\x7f\x02hi",
    "another protocol": to(hello=pb.Hello(protocol=2, speed_hint=1.0)),
    "no protocol": to(hello=pb.Hello(speed_hint=1.0)),
    "speed NaN": to(hello=pb.Hello(protocol=1, speed_hint=float("nan"))),
    "speed infinite": to(hello=pb.Hello(protocol=1, speed_hint=float("inf"))),
    "speed negative": to(hello=pb.Hello(protocol=1, speed_hint=-1.0)),
    "speed zero": to(hello=pb.Hello(protocol=1, speed_hint=0.0)),
    "speed 1e300": to(hello=pb.Hello(protocol=1, speed_hint=1e300)),
    "seconds NaN": to(contribute=pb.Contribute(lease_id=1, seconds=float("nan"))),
    "seconds zero": to(contribute=pb.Contribute(lease_id=1, seconds=0.0)),
    "seconds negative": to(contribute=pb.Contribute(lease_id=1, seconds=-3.0)),
    "seconds infinite": to(contribute=pb.Contribute(lease_id=1, seconds=float("inf"))),
}


def test_nonsense_ends_the_session(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client:
        for name, nonsense in ENDED_BY.items():
            answers = client.say(HELLO, nonsense, HELLO)
            assert [answer.stop.refused for answer in answers] == [True], name
            assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
            assert isinstance(crew.heard.next("mala"), Hello)
            assert crew.heard.messages["mala"].empty(), name
            assert crew.works()


BORNE = {
    "passes 2^64-1": to(progress=pb.Progress(passes=HUGE)),
    "an answer without tensors": to(contribute=pb.Contribute(lease_id=1, seconds=1.0, valid=True)),
    "numbers of 2^64-1": to(contribute=pb.Contribute(lease_id=HUGE, tokens=HUGE, seconds=1e308, valid=True)),
    "loss NaN": to(contribute=pb.Contribute(lease_id=1, seconds=1.0, loss_sum=float("nan"), valid=True)),
    "tensors of nobody": to(contribute=pb.Contribute(lease_id=1, seconds=1.0, upload="x" * MIB, valid=True)),
    "an environment of 1 MB": to(hello=pb.Hello(protocol=1, speed_hint=1.0, environment={"x" * MIB: "y" * MIB})),
    "100,000 facts": to(hello=pb.Hello(protocol=1, speed_hint=1.0, environment={str(i): "" for i in range(100_000)})),
    "a goodbye of 1 MB": to(goodbye=pb.Goodbye(reason="x" * MIB)),
    "unknown fields": HELLO.SerializeToString() + b"\xfa\x7f\x02hi" * 1000,
    "two kinds at once": HELLO.SerializeToString() + to(progress=pb.Progress(passes=1)).SerializeToString(),
}


def test_what_is_borne_is_bounded(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client, memory_stays(96 * MIB):
        for message in BORNE.values():
            client.say(message)
            wait_for(lambda: crew.desk.workers() == ["ana"])
            assert crew.works()
    while not crew.heard.messages["mala"].empty():
        match crew.heard.next("mala"):
            case Contribute() as answer:
                assert not answer.valid
                assert answer.tensors == {}
            case Hello() as hello:
                assert len(hello.environment) <= 100
                assert all(len(key) + len(value) <= 2 * wire.MAX_TEXT for key, value in hello.environment.items())
            case Goodbye() as goodbye:
                assert len(goodbye.reason) <= wire.MAX_TEXT


def test_hundreds_of_damaged_messages_over_sessions(crew: Crew) -> None:
    chance = random.Random(11)
    seeds = [message.SerializeToString() for message in SEEDS[pb.ToCoordinator]]
    with abuser(crew, crew.node("mala")) as client, memory_stays(96 * MIB):
        for _ in range(300):
            client.say(*(mutated(chance.choice(seeds), chance) for _ in range(3)))
    while not crew.heard.messages["mala"].empty():
        heard = crew.heard.next("mala")
        assert not isinstance(heard, Contribute) or not heard.valid
    wait_for(lambda: crew.desk.workers() == ["ana"])
    assert crew.works()


# Uploads and downloads


def chunk(data: bytes = b"", **fields: Any) -> pb.Chunk:
    return pb.Chunk(data=data, crc=fields.pop("crc", zlib.crc32(data)), **fields)


def first_chunk(data: bytes, *, layout: wire.Layout = LAYOUT, num_bytes: int | None = None) -> pb.Chunk:
    size = layout.num_bytes if num_bytes is None else num_bytes
    return chunk(data, name="u", num_bytes=size, tensors=layout.describe())


WHOLE = bytes(LAYOUT.num_bytes)
OTHER_SHAPE = wire.Layout((("bias", torch.float32, (3,)), ("weight", torch.float32, (4, 2))))
OTHER_DTYPE = wire.Layout((("bias", torch.int32, (3,)), ("weight", torch.int32, (2, 4))))
HUGE_SHAPE = [pb.Tensor(name="bias", dtype="float32", shape=[HUGE] * 8)]
HOSTILE_UPLOADS: dict[str, list[pb.Chunk | bytes]] = {
    "nothing": [],
    "one chunk of nothing": [pb.Chunk()],
    "another size": [first_chunk(WHOLE, num_bytes=LAYOUT.num_bytes + 1)],
    "2^64-1 bytes": [first_chunk(WHOLE, num_bytes=HUGE)],
    "another shape": [first_chunk(WHOLE, layout=OTHER_SHAPE)],
    "another dtype": [first_chunk(WHOLE, layout=OTHER_DTYPE)],
    "an unknown dtype": [chunk(WHOLE, num_bytes=len(WHOLE), tensors=[pb.Tensor(name="bias", dtype="object")])],
    "shapes of 2^64-1": [chunk(WHOLE, num_bytes=len(WHOLE), tensors=HUGE_SHAPE)],
    "a wrong checksum": [chunk(WHOLE, crc=1, num_bytes=len(WHOLE), tensors=LAYOUT.describe())],
    "too much": [first_chunk(WHOLE), chunk(b"x")],
    "too much at once": [first_chunk(WHOLE + bytes(3 * MIB))],
    "too little": [first_chunk(WHOLE[:-1])],
    "a second beginning": [first_chunk(WHOLE[:20]), first_chunk(WHOLE)],
    "5 MiB in a chunk": [first_chunk(bytes(5 * MIB))],
    "noise": [b"\xff" * 1000],
}


def test_hostile_uploads_are_refused(crew: Crew) -> None:
    identity = crew.node("mala")
    connection = Connection(crew.address, identity=identity)
    session = connection.session(parameters=LAYOUT)
    session.call(Hello(speed_hint=1.0))
    assert isinstance(crew.heard.next("mala"), Hello)
    with abuser(crew, identity) as client, memory_stays(64 * MIB):
        for name, chunks in HOSTILE_UPLOADS.items():
            got = client.status("Upload", chunks)
            assert got in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL"), name
            session._outgoing.put(Contribute(lease_id=1, tokens=1, loss_sum=1.0, seconds=1.0, tensors="u"))
            answer = crew.heard.next("mala")
            assert isinstance(answer, Contribute)
            assert not answer.valid, name
            assert crew.works()
    session.close()
    connection.close()


def test_a_million_tensors_in_one_chunk(crew: Crew) -> None:
    """4 MiB on the wire may not become hundreds of MiB here."""
    identity = crew.node("mala")
    raw = b"\x12\x00" * (2 * MIB - 1000)
    with abuser(crew, identity) as client:
        hello = Held([hello_bytes()])
        call = client.stream("Session", hello)
        assert isinstance(crew.heard.next("mala"), Hello)
        with peak_memory() as peak:
            assert client.status("Upload", [raw]) == "INVALID_ARGUMENT"
        hello.more.put(None)
        call.cancel()
    assert peak() < 192 * MIB
    assert crew.works()


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """The largest growth of this process's memory, looked at every few milliseconds."""
    process, stop, largest = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def look() -> None:
        while not stop.wait(0.005):
            largest[0] = max(largest[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=look, name="looks at the memory")
    watcher.start()
    try:
        yield lambda: largest[0]
    finally:
        stop.set()
        watcher.join()


class Held:
    """Messages, and then no end of the stream, until it is released."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self.messages = iter(messages)
        self.waits = threading.Event()
        self.more: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[bytes]:
        yield from self.messages
        self.waits.set()
        yield from iter(self.more.get, None)


def assemblies() -> list[wire.Assembly]:
    return [item for item in gc.get_objects() if type(item) is wire.Assembly and item.buffer]


def test_a_node_has_one_upload_at_a_time(big_crew: Crew) -> None:
    """Or a node that begins a thousand takes a thousand times the model's memory."""
    crew, identity, count = big_crew, big_crew.node("mala"), 12
    begun = [first_chunk(bytes(MIB), layout=BIG), *(chunk(bytes(MIB)) for _ in range(7))]
    session_held, held = Held([hello_bytes()]), []
    with abuser(crew, identity) as client:
        session = client.stream("Session", session_held)
        assert isinstance(crew.heard.next("mala"), Hello)
        calls = []
        for _ in range(count):
            held.append(Held([item.SerializeToString() for item in begun]))
            calls.append(client.stream("Upload", held[-1]))
        try:
            wait_for(
                lambda: sum(call.done() for call in calls) + sum(a.received == 8 * MIB for a in assemblies()) >= count
            )
            num_buffers = len(assemblies())
        finally:
            for each in (session_held, *held):
                each.more.put(None)
            for call in (*calls, session):
                call.cancel()
    assert num_buffers <= 1
    assert crew.works()


def test_uploads_without_an_end_are_harmless(crew: Crew) -> None:
    """Empty chunks for ever, a stream that stops in the middle; then the node's own next upload counts."""
    identity = crew.node("mala")
    stop = threading.Event()

    def endless() -> Iterator[bytes]:
        yield first_chunk(WHOLE[:20]).SerializeToString()
        while not stop.is_set():
            yield chunk(b"").SerializeToString()

    with abuser(crew, identity) as client:
        hello, stalled = Held([hello_bytes()]), Held([first_chunk(WHOLE[:20]).SerializeToString()])
        session = client.stream("Session", hello)
        assert isinstance(crew.heard.next("mala"), Hello)
        calls = [client.stream("Upload", stalled), client.stream("Upload", endless())]
        assert stalled.waits.wait(CEILING_SECONDS)
        with memory_stays(64 * MIB):
            assert all(crew.works() for _ in range(20))
        stop.set()
        for each in (hello, stalled):
            each.more.put(None)
        for call in (*calls, session):
            call.cancel()
    wait_for(lambda: crew.desk.workers() == ["ana"])
    assert crew.works()


def test_downloads_from_beyond_the_end(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    assert crew.works()  # makes version 1
    with abuser(crew, crew.node("mala")) as client:
        for offset in (0, 1, 499, 500, 501, 2**31, 2**63 - 1, 2**63, HUGE):
            for name in ("version-1", (b"f" * 32).hex()):
                got = client.status("Download", [pb.DownloadRequest(name=name, offset=offset)])
                assert got in ("OK", "OUT_OF_RANGE", "INVALID_ARGUMENT"), (name, offset)
    assert "Traceback" not in caplog.text
    assert crew.works()


NOT_OFFERED = (
    "",
    "version-0",
    "version--1",
    "../crew/ca.key",
    "/etc/passwd",
    "crew/ca.key",
    "file.bin",
    "ñ",
    "x" * MIB,
)


def test_downloads_of_what_is_not_offered(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    with abuser(crew, crew.node("mala")) as client:
        for name in NOT_OFFERED:
            assert client.status("Download", [pb.DownloadRequest(name=name)]) == "NOT_FOUND", name[:80]
    assert "Traceback" not in caplog.text
    assert crew.works()


# Using up what is shared

NUM_STALLED = 300
"""More than the threads of the server."""


@pytest.mark.parametrize(
    ("kind", "method"),
    [("enrol", "Enroll"), ("enrol", "Describe"), ("node", "Describe"), ("node", "Upload"), ("node", "Session")],
)
def test_calls_that_are_never_finished_stop_nobody_else(crew: Crew, kind: str, method: str) -> None:
    """Calls without a message, ten on a connection; another node is answered after each of them."""
    crew.desk.adopt_invites({hash_secret(new_secret()): 1})
    identity = crew.node("mala") if kind == "node" else enrol_identity(crew.keys.identity.certificate)
    held, clients, calls = Held([]), [], []
    answered = 0
    try:
        for number in range(NUM_STALLED):
            if number % 10 == 0:
                clients.append(Abuser(crew, identity))
            calls.append(clients[-1].stream(method, held))
            with contextlib.suppress(LinkError):
                crew.ana.describe()
                answered += 1
                continue
            break
        if answered == NUM_STALLED:
            assert crew.works()
    finally:
        for call in calls:
            held.more.put(None)
            call.cancel()
        for client in clients:
            client.close()
    assert answered == NUM_STALLED


# One identity, two connections


def test_a_newer_session_fences_the_older_one(crew: Crew) -> None:
    identity = crew.node("mala")
    older, late = Held([hello_bytes()]), Held([first_chunk(WHOLE[:20]).SerializeToString()])
    with abuser(crew, identity) as client:
        old = client.stream("Session", older)
        assert isinstance(crew.heard.next("mala"), Hello)
        upload = client.stream("Upload", late)
        assert late.waits.wait(CEILING_SECONDS)
        assert crew.works()
        connection = Connection(crew.address, identity=identity)
        newer = connection.session(parameters=LAYOUT)
        newer.call(Hello(speed_hint=2.0))
        hello = crew.heard.next("mala")
        assert isinstance(hello, Hello)
        assert hello.speed_hint == 2.0
        for message in (Goodbye(reason="late"), Hello(speed_hint=3.0)):
            older.more.put(wire.to_coordinator(message).SerializeToString())
        told = [pb.ToWorker.FromString(answer) for answer in old]
        assert [answer.stop.refused for answer in told] == [True]
        late.more.put(chunk(WHOLE[20:]).SerializeToString())
        late.more.put(None)
        for _ in upload:
            pass
        newer._outgoing.put(Contribute(lease_id=1, tokens=1, loss_sum=1.0, seconds=1.0, tensors="u"))
        answer = crew.heard.next("mala")
        assert isinstance(answer, Contribute)  # and not the late Goodbye, nor the late Hello
        assert not answer.valid  # what the older session uploaded is not the newer one's
        assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
        assert crew.desk.workers() == ["ana", "mala"]
        older.more.put(None)
        newer.close()
        connection.close()
    wait_for(lambda: crew.desk.workers() == ["ana"])
    assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
    assert crew.heard.goodbyes.empty()
    assert crew.works()


def test_many_connections_of_one_identity_are_one_worker(crew: Crew) -> None:
    identity = crew.node("mala")
    clients, calls, helds = [], [], []
    for number in range(20):
        clients.append(Abuser(crew, identity))
        helds.append(Held([wire.to_coordinator(Hello(speed_hint=number + 1.0)).SerializeToString()]))
        calls.append(clients[-1].stream("Session", helds[-1]))
        assert isinstance(crew.heard.next("mala"), Hello)
    assert crew.desk.workers() == ["ana", "mala"]
    for call in calls[:-1]:
        assert [pb.ToWorker.FromString(answer).stop.refused for answer in call] == [True]
    for held, client in zip(helds, clients, strict=True):
        held.more.put(None)
        client.close()
    wait_for(lambda: crew.desk.workers() == ["ana"])
    assert crew.works()


# A whole run with an enemy in the crew


class Besieged(_Crew):
    """`worker-3` is a node that turned bad: it behaves as `enemy` says. `after` is called before the door closes."""

    def __init__(
        self,
        parts: Parts,
        folder: Path,
        *,
        enemy: Callable[["Besieged", Connection, str], None],
        wrap_link: WrapLink | None = None,
        after: Callable[["Besieged"], None] | None = None,
    ) -> None:
        super().__init__(parts, folder, wrap_link=wrap_link)
        self.enemy = enemy
        self.after = after
        self.address = ""

    def work(self, name: str, speed: float, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        if name != "worker-3":
            super().work(name, speed, port)
            return
        identity = join(self.folder / name, name=name, crew=self.keys)
        self.nodes.add(name, certificate=identity.certificate)
        connection = Connection(self.address, identity=identity)
        try:
            self.enemy(self, connection, name)
        finally:
            connection.close()

    def run(self) -> Outcome:
        outcome = super().run()
        if self.after is not None:
            self.after(self)
        return outcome


def besiege(
    folder: Path,
    enemy: Callable[[Besieged, Connection, str], None],
    *sets: str,
    wrap_link: WrapLink | None = None,
    after: Callable[[Besieged], None] | None = None,
) -> Outcome:
    """A strict run of two honest workers and an enemy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parts = prepare(folder, RaggedRegression(), workers([1.0, 1.0, 1.0]), "sync.strict=true", *sets)
    crew = Besieged(parts, folder / "crew", enemy=enemy, wrap_link=wrap_link, after=after)
    try:
        return crew.run()
    finally:
        crew.desk.close()
        for thread in crew.threads:
            thread.join()
        parts.store.close()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    execute(folder, RaggedRegression(), workers([1.0]), "sync.strict=true")
    return final_sha256(folder)


def claim(session: Any, lease_id: int, **values: Any) -> None:
    """An answer to any lease, with an upload of noise behind it that fits the model."""
    fixed = {name: torch.full(shape, 2**40, dtype=torch.int64) for name, _, shape in session._parameters.entries}
    fields = {"tokens": 3, "loss_sum": 1.0, "seconds": 0.01, **values}
    session.call(Contribute(lease_id=lease_id, tensors=session.upload(fixed), **fields))


def test_answers_to_the_leases_of_others_are_not_counted(tmp_path: Path, undisturbed: str) -> None:
    """While honest workers hold leases, a node answers them with noise; also old ones, and ones that never were."""
    attacked = threading.Event()
    claimed: set[int] = set()

    def enemy(crew: Besieged, connection: Connection, name: str) -> None:
        ledger = crew.parts.coordination._coordinator.ledger
        try:
            for _attempt in range(30):
                session = connection.session(parameters=wire.Layout.of(crew.params))
                try:
                    session.call(Hello(speed_hint=1.0, environment=environment(crew.parts.device)))
                    if isinstance(session.next_event(), Stop):
                        return
                    others = {key for key, grant in list(ledger.leases.items()) if grant.worker != name}
                    if others:
                        near = range(max(0, min(others) - 3), max(others) + 2)  # old ones, too
                        own = set(ledger.leases) - others
                        for lease_id in (*sorted(others.union(near) - own), HUGE, 2**63):
                            claim(session, lease_id)
                        claimed.update(others)
                        attacked.set()
                finally:
                    session.close()  # without a goodbye: a lease of its own goes back
        except LinkError:
            pass  # the run is over
        finally:
            attacked.set()

    wrap, played = play(
        *(
            Script(worker=name, at=0, phase="contribute", action=lambda: attacked.wait(CEILING_SECONDS) and None)
            for name in ("worker-1", "worker-2")
        )
    )
    outcome = besiege(tmp_path / "run", enemy, wrap_link=wrap)
    assert outcome.complete
    assert played
    discarded = {row["lease"] for row in read_jsonl(RunDir(tmp_path / "run").events) if row["event"] == "discarded"}
    assert claimed
    assert claimed & discarded  # those that the held-up workers had; when both have answered it is "the same again"
    assert {HUGE, 2**63} <= discarded
    assert final_sha256(tmp_path / "run") == undisturbed


def test_a_node_that_says_anything_at_all_changes_nothing(tmp_path: Path, undisturbed: str) -> None:
    chance = random.Random(13)
    seeds = [message.SerializeToString() for message in SEEDS[pb.ToCoordinator]]

    def enemy(crew: Besieged, connection: Connection, name: str) -> None:
        hello = wire.to_coordinator(Hello(speed_hint=1.0, environment=environment(crew.parts.device)))
        call = connection._channel.stream_stream(SERVICE + "Session")
        for _ in range(40):
            said = [hello.SerializeToString(), *(mutated(chance.choice(seeds), chance) for _ in range(5))]
            with contextlib.suppress(grpc.RpcError):
                for _answer in call(iter(said), timeout=CEILING_SECONDS):
                    pass

    outcome = besiege(tmp_path / "run", enemy)
    assert outcome.complete
    assert final_sha256(tmp_path / "run") == undisturbed


def test_joining_while_the_run_finishes(tmp_path: Path, undisturbed: str) -> None:
    """After the last step, and while the door closes: told that the run has ended, or not reached; nobody hangs."""
    told: list[str] = []
    last_joined = threading.Event()

    def enemy(crew: Besieged, connection: Connection, name: str) -> None:
        session = connection.session(parameters=wire.Layout.of(crew.params))
        session.close()  # in the crew, but not a member of the run

    def join_on_and_on(crew: Besieged) -> None:
        layout = wire.Layout.of(crew.params)
        identity = join(crew.folder / "late", name="late", crew=crew.keys)
        crew.nodes.add("late", certificate=identity.certificate)
        connection = Connection(crew.address, identity=identity)
        try:
            while True:
                session = connection.session(parameters=layout)
                try:
                    session.call(Hello(speed_hint=1.0, environment=environment(crew.parts.device)))
                    event = session.next_event()
                    assert isinstance(event, Stop)
                    assert not event.refused
                    told.append(event.reason)
                finally:
                    session.close()
                    last_joined.set()
        except LinkError as error:
            told.append(error.message)
        finally:
            connection.close()

    def after(crew: Besieged) -> None:
        crew.threads.append(threading.Thread(target=join_on_and_on, args=(crew,)))
        crew.threads[-1].start()
        assert last_joined.wait(CEILING_SECONDS)

    outcome = besiege(tmp_path / "run", enemy, after=after)
    assert outcome.complete
    assert told[0] == "the run has ended"
    assert set(told[:-1]) == {"the run has ended"}
    assert final_sha256(tmp_path / "run") == undisturbed


# What a member may say that the run has to survive: the state machine behind its I/O shell, without a network


class Members:
    """Members of a strict run, by what they send and are sent."""

    def __init__(self, folder: Path, *sets: str) -> None:
        self.parts = prepare(folder, RaggedRegression(), workers([1.0, 1.0]), "sync.strict=true", *sets)
        self.coordination: Coordination = self.parts.coordination
        self.sent: defaultdict[str, list[ToWorker]] = defaultdict(list)
        self.coordination.open(lambda worker, message: self.sent[worker].append(message))
        self.layout = wire.Layout.of(dict(self.parts.model.named_parameters()), dtype=torch.int64)

    def says(self, worker: str, message: pb.ToCoordinator) -> None:
        uploads = wire.Uploads()
        uploads.put("u", self.layout.unpack(bytearray(self.layout.num_bytes)))
        self.coordination.deliver(worker, wire.from_worker(message, uploads=uploads))

    def joins(self, worker: str, *, speed_hint: float = 1.0, **facts: str) -> None:
        self.says(worker, to(hello=pb.Hello(protocol=1, speed_hint=speed_hint, environment=facts)))

    def leases(self, worker: str) -> list[Lease]:
        return [message for message in self.sent[worker] if isinstance(message, Lease)]

    def answers(self, worker: str, **fields: Any) -> None:
        values = {"tokens": 9, "loss_sum": 1.0, "seconds": 0.1, "upload": "u", "valid": True, **fields}
        self.says(worker, to(contribute=pb.Contribute(lease_id=self.leases(worker)[-1].lease_id, **values)))


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path / "run")
    yield made
    made.parts.store.close()


def play_rounds(members: Members, rounds: int, *, hint: float, **answer: Any) -> None:
    """`mala` claims a speed and answers its leases in its way; `ana` is honest. Then mala is gone."""
    with contextlib.suppress(LinkError):  # it may be refused
        members.joins("mala", speed_hint=hint)
    members.joins("ana")
    done: set[int] = set()
    for _ in range(rounds):
        for worker, fields in (("mala", answer), ("ana", {})):
            if (leases := members.leases(worker)) and leases[-1].lease_id not in done:
                done.add(leases[-1].lease_id)
                members.answers(worker, **fields)
    assert members.coordination.failure is None
    members.coordination.left("mala", "gone")
    assert members.coordination.failure is None


@pytest.mark.parametrize(("hint", "seconds"), [(5e-324, 1.0), (1e-300, 5e-324), (1e-12, 1e-9), (9.9e11, 1e300)])
def test_claims_of_speed_do_not_bring_the_run_down(members: Members, hint: float, seconds: float) -> None:
    play_rounds(members, 6, hint=hint, seconds=seconds)


@pytest.mark.parametrize(
    "answer",
    [
        {"tokens": HUGE},
        {"tokens": 0},
        {"loss_sum": 1.7e308},
        {"loss_sum": -1.7e308},
        {"tokens": 0, "loss_sum": 1.7e308},
        {"loss_sum": float("nan")},
        {"upload": "other"},
        {"valid": False},
    ],
    ids=str,
)
def test_answers_do_not_bring_the_run_down(members: Members, answer: dict[str, Any]) -> None:
    """Wrong gradients are another matter: they are detected at best."""
    play_rounds(members, 6, hint=1.0, **answer)


def test_names_of_facts_reach_no_terminal_as_they_are(members: Members, caplog: pytest.LogCaptureFixture) -> None:
    """The reason of a refusal is printed here and on the other machine: no escape sequences, and not without end."""
    members.joins("ana", torch="2.10")
    with caplog.at_level(logging.WARNING, logger="cuadrilla"):
        members.joins("mala", **{"\x1b]0;owned\x07\x1b[2J": "\x1b[31m\n" + "x" * 10_000})
    stop = members.sent["mala"][-1]
    assert isinstance(stop, Stop)
    assert stop.refused
    for text in (stop.reason, caplog.text.rstrip("\n")):
        assert len(text) < 2_000
        assert "\x1b" not in text
        assert "\n" not in text


def test_a_member_that_only_claims_to_be_busy_does_not_hold_the_run(members: Members) -> None:
    """It has told of one very slow answer, and holds its next lease without progress: others get its units."""
    now = [0.0]
    members.coordination._clock = lambda: now[0]
    rules = members.coordination._coordinator.rules
    object.__setattr__(rules, "lost_after_seconds", 5.0)
    object.__setattr__(rules, "hung_after_seconds", 10.0)
    members.joins("mala")
    members.joins("ana")
    members.coordination.heard("mala", 1)
    members.coordination.tick()
    members.answers("mala", seconds=1e9)
    members.answers("ana")
    before = members.coordination._coordinator.version
    for _ in range(600):
        now[0] += 1.0
        for worker in ("mala", "ana"):
            members.coordination.heard(worker, 1)
        members.coordination.tick()
        for lease in members.leases("ana"):
            if lease.lease_id in members.coordination._coordinator.ledger.leases:
                members.coordination.heard("ana", int(now[0]) + 2)
                members.coordination.tick()
                members.answers("ana")
    assert members.coordination.failure is None
    assert members.coordination._coordinator.version > before + 1
