"""A coordinator's transport with a receiver that only records, and a hand-made client that may send it anything."""

import contextlib
import gc
import queue
import random
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Hello, Lease, NodeReport, Progress, ToCoordinator, Version
from cuadrilla.link.gate import bind
from cuadrilla.link.grpc_calls import DEVICE_KEY
from cuadrilla.link.grpc_client import SERVICE, Connection
from cuadrilla.link.grpc_ray import RayHeadServer
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.grpc_standby import StandbyServer
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.offer import Offer
from cuadrilla.link.tls import SERVER_NAME, Identity, open_coordinator
from tests.crews import join

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
        self.progress: defaultdict[str, list[int]] = defaultdict(list)
        self.reports: defaultdict[str, list[NodeReport]] = defaultdict(list)

    def deliver(self, worker: str, message: ToCoordinator) -> None:
        self.messages[worker].put(message)

    def heard(self, worker: str, progress: Progress) -> None:
        self.progress[worker].append(progress.micro_steps)

    def reported(self, worker: str, report: NodeReport) -> None:
        self.reports[worker].append(report)

    def left(self, worker: str, reason: str) -> None:
        self.goodbyes.put((worker, reason))

    def next(self, worker: str) -> ToCoordinator:
        return self.messages[worker].get(timeout=CEILING_SECONDS)


class Crew:
    """A server that serves, its keys, and an honest worker `ana` that has joined."""

    def __init__(
        self,
        folder: Path,
        *,
        contribution: wire.Layout = LAYOUT,
        standbys: frozenset[str] = frozenset(),
        ray: RayHeadServer | None = None,
    ) -> None:
        self.folder = folder
        self.keys = open_coordinator(folder / "crew", now=datetime.now(UTC))
        self.nodes = AllowList(folder / "crew" / "nodes.json")
        self.heard = Heard()
        self.now = 0.0
        file = folder / "file.bin"
        file.write_bytes(b"shard" * 100)
        self.server = CrewServer(
            keys=self.keys,
            nodes=self.nodes,
            receiver=self.heard,
            offer=Offer(config="{}", files={"file.bin": (file, b"f" * 32)}),
            parameters=LAYOUT,
            contribution=contribution,
            ray=ray,
            standby=StandbyServer(names=standbys, keys=folder / "crew", run=folder / "run"),
            clock=lambda: self.now,
        )
        self.port = self.server.serve(bind("127.0.0.1:0"))
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
        self.server.send("ana", lease)
        assert self.session.next_event() == lease
        self.server.send("ana", Version(version=self.leases, parameters=PARAMETERS))
        version = self.session.next_event()
        assert isinstance(version, Version)
        got = self.session.download(version.parameters)
        assert all(torch.equal(got[name], PARAMETERS[name]) for name in PARAMETERS)
        layout = self.server._usual.contribution
        sent = layout.unpack(bytearray(random.Random(self.leases).randbytes(layout.num_bytes)))
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
    """A client of the link with an identity of its own that sends whatever bytes it is given."""

    def __init__(self, crew: Crew, identity: Identity | None, *, ca: bytes = b"") -> None:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=ca or crew.keys.identity.ca,
            private_key=identity.key if identity else None,
            certificate_chain=identity.certificate if identity else None,
        )
        options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(crew.address, credentials, options=[*options, ("grpc.enable_retries", 0)])

    def stream(self, method: str, requests: Iterable[bytes], *, device: str = "", patient: bool = False) -> Any:
        """A call of any method, with as many messages as one likes; a patient one connects again when it is reset."""
        call = self.channel.stream_stream(SERVICE + method)
        metadata = ((DEVICE_KEY, device),) if device else ()
        return call(iter(requests), timeout=4 * CEILING_SECONDS, wait_for_ready=patient, metadata=metadata)

    def status(self, method: str, requests: Iterable[Any], *, device: str = "") -> str:
        """How the call ends, once it has."""
        raw = (item if isinstance(item, bytes) else item.SerializeToString() for item in requests)
        call = self.stream(method, raw, device=device)
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


def hello_bytes() -> bytes:
    raw: bytes = wire.to_coordinator(Hello(speed_hint=1.0)).SerializeToString()
    return raw


def chunk(data: bytes = b"", **fields: Any) -> pb.Chunk:
    return pb.Chunk(data=data, crc=fields.pop("crc", zlib.crc32(data)), **fields)


def first_chunk(data: bytes, *, layout: wire.Layout = LAYOUT, num_bytes: int | None = None) -> pb.Chunk:
    size = layout.num_bytes if num_bytes is None else num_bytes
    return chunk(data, name="u", num_bytes=size, tensors=layout.describe())


WHOLE = bytes(LAYOUT.num_bytes)


SEEDS = {
    pb.ToCoordinator: [
        pb.ToCoordinator(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=1.0, environment={"torch": "2.10"})),
        pb.ToCoordinator(progress=pb.Progress(micro_steps=7)),
        pb.ToCoordinator(contribute=pb.Contribute(lease_id=3, tokens=5, loss_sum=1.0, upload="u")),
        pb.ToCoordinator(goodbye=pb.Goodbye(reason="done")),
        pb.ToCoordinator(report=pb.Report(usage=pb.Usage(cpu_percent=3, gpus=[pb.Gpu(name="x")]), phase="waiting")),
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


def to(**kind: Any) -> pb.ToCoordinator:
    return pb.ToCoordinator(**kind)
