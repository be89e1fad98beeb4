"""A coordinator's server whose receiver only records messages, and a client that can send it any bytes."""

import contextlib
import gc
import queue
import random
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

from cuadrilla.home import Home
from cuadrilla.link import wire
from cuadrilla.link.base import (
    Contribution,
    Goodbye,
    Hello,
    Lease,
    NodeReport,
    Offer,
    Progress,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.link.client import FROM_COORDINATOR, Connection
from cuadrilla.link.identity import SERVER_NAME, Identity
from cuadrilla.link.server import CrewServer

MIB = 2**20
CEILING_SECONDS = 20.0  # for what happens at once unless there is a bug
HUNG_UP_SECONDS = 5.0  # how long a connection that says nothing useful may last
SLACK_SECONDS = 5.0
PARAMETERS = {"bias": torch.arange(3.0), "weight": torch.arange(8.0).view(2, 4)}
LAYOUT = wire.Layout.of(PARAMETERS)
BIG = wire.Layout((("weight", torch.float32, (4, MIB)),))  # 16 MiB
HUGE = 2**64 - 1


class Heard:
    """A receiver that keeps the messages of each worker."""

    def __init__(self) -> None:
        self.messages: defaultdict[str, queue.SimpleQueue[ToCoordinator]] = defaultdict(queue.SimpleQueue)
        self.goodbyes: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.progress: defaultdict[str, list[int]] = defaultdict(list)

    def deliver(self, worker: str, message: ToCoordinator | NodeReport) -> None:
        match message:
            case Progress():
                self.progress[worker].append(message.micro_steps)
            case NodeReport():
                pass
            case Goodbye():
                self.goodbyes.put((worker, message.reason))
            case _:
                self.messages[worker].put(message)

    def next(self, worker: str) -> ToCoordinator:
        return self.messages[worker].get(timeout=CEILING_SECONDS)


class Crew:
    """A running server, its keys, and an honest worker `ana` that has joined."""

    def __init__(
        self, folder: Path, *, contribution: wire.Layout = LAYOUT, standbys: frozenset[str] = frozenset()
    ) -> None:
        self.folder = folder
        self.heard = Heard()
        folder.mkdir(exist_ok=True)
        file = folder / "file.bin"
        file.write_bytes(b"shard" * 100)
        self.server = CrewServer(
            Home(folder),
            receive=self.heard.deliver,
            offer=Offer(config="{}", files={"file.bin": (file, "66" * 32)}),
            contributions=[contribution],
            standbys=standbys,
            run=folder / "run",
        )
        self.keys, self.nodes = self.server.keys, self.server.nodes
        self.port = self.server.serve("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self.leases = 0
        self.ana = Connection(self.address, identity=self.node("ana"))
        self.session = self.ana.session(parameters=[LAYOUT])
        self.session.call(Hello(speed_hint=1.0))
        assert isinstance(self.heard.next("ana"), Hello)

    @property
    def stranger(self) -> Identity:
        """An identity with the coordinator's certificate, but without a token."""
        return Identity(certificate=self.keys.certificate)

    def node(self, name: str) -> Identity:
        return self.server.admit(name)

    def workers(self) -> list[str]:
        """Names of the workers that have a session now."""
        return sorted(self.server._sessions)

    def works(self) -> bool:
        """Whether the honest worker gets a lease and a version, and its answer arrives with the tensors it sent."""
        self.leases += 1
        lease = Lease(lease_id=self.leases, version=self.leases, units=(1, 2), planned_tokens=9)
        self.server.send("ana", lease)
        assert self.session.next_event() == lease
        self.server.send("ana", Version(version=self.leases, parameters=PARAMETERS))
        version = self.session.next_event()
        assert isinstance(version, Version)
        got = self.session.download(version.parameters)
        assert all(torch.equal(got[name], PARAMETERS[name]) for name in PARAMETERS)
        layout = self.server._contributions[0]
        noise = random.Random(self.leases).randbytes(layout.num_bytes - len(layout.header))
        sent = layout.views(bytearray(layout.header + noise))
        answer = Contribution(lease_id=self.leases, tokens=5, loss_sum=1.5, tensors=sent)
        self.session.call(answer)
        heard = self.heard.next("ana")
        assert isinstance(heard, Contribution)
        assert heard.lease_id == self.leases
        assert heard.valid
        return all(torch.equal(heard.tensors[name].view(torch.int32), sent[name].view(torch.int32)) for name in sent)

    def close(self) -> None:
        self.session.close()
        self.ana.close()
        closing = threading.Thread(target=self.server.close, name="closes the server", daemon=True)
        closing.start()
        closing.join(CEILING_SECONDS)
        assert not closing.is_alive(), "the coordinator cannot end"


class Abuser:
    """A client of the link that sends any bytes under the identity that it is given."""

    def __init__(self, crew: Crew, identity: Identity) -> None:
        credentials = grpc.ssl_channel_credentials(root_certificates=identity.certificate)
        self.token = identity.token
        options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(crew.address, credentials, options=[*options, ("grpc.enable_retries", 0)])

    def stream(self, method: str, requests: Iterable[bytes], *, device: str = "", secret: bytes = b"") -> Any:
        """Call a method of the service with any number of messages."""
        call = self.channel.stream_stream(f"/{wire.SERVICE}/{method}")
        told = {wire.TOKEN_KEY: self.token, wire.DEVICE_KEY: device, wire.INVITE_KEY: secret}
        metadata = tuple((key, value) for key, value in told.items() if value)
        return call(iter(requests), timeout=4 * CEILING_SECONDS, metadata=metadata)

    def status(self, method: str, requests: Iterable[Any], *, device: str = "", secret: bytes = b"") -> str:
        """Make a call, wait for its end, and return its status code."""
        call = self.stream(method, map(raw, requests), device=device, secret=secret)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        name: str = call.code().name
        return name

    def say(self, *messages: object) -> list[ToWorker]:
        """Send these messages in a session, and return the answers that came until it ended."""
        answers = []
        with contextlib.suppress(grpc.RpcError):
            for answer in self.stream("Session", map(raw, messages)):
                answers.append(wire.decode(answer, *FROM_COORDINATOR))
        return answers

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def memory_stays(limit_bytes: int) -> Iterator[None]:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss - before < limit_bytes


class Held:
    """A stream of messages that does not end after the last one until `more` gets None. `waits`: all were sent."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self.messages = iter(messages)
        self.waits = threading.Event()
        self.more: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[bytes]:
        yield from self.messages
        self.waits.set()
        yield from iter(self.more.get, None)


def raw(item: object) -> bytes:
    return item if isinstance(item, bytes) else wire.encode(item)


def upload(lease_id: int = 1, **fields: Any) -> Contribution:
    """The first message of an upload."""
    return Contribution(lease_id=lease_id, **{"tokens": 1, "loss_sum": 1.0, **fields})


def uploaded(head: object, *chunks: bytes) -> list[object]:
    """The messages of a session that upload these chunks."""
    return [head, *chunks]


WHOLE = LAYOUT.header + bytes(LAYOUT.num_bytes - len(LAYOUT.header))
