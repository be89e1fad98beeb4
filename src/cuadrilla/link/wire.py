"""Messages and tensors of `link/base.py` as bytes on a connection, and back. No I/O.

Tensors travel as their raw little-endian bytes, one after another without gaps, in chunks of at most `CHUNK_BYTES`,
each with a CRC-32; the first chunk says what follows. A receiver knows beforehand what it may get (`Layout`): it
compares before it allocates, so that no peer can make it take more memory than the model has.

What costs time here is memory that the kernel has to clear, not copying: large buffers are used again (`Memory`).
"""

import math
import sys
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from cuadrilla.dtypes import DTYPES, dtype_name
from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.base import (
    Computed,
    Contribution,
    Goodbye,
    Hello,
    Lease,
    Progress,
    Stop,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

PROTOCOL = 2
"""Version of the protocol. A worker that speaks another is refused, whatever its versions of cuadrilla and torch."""
CHUNK_BYTES = 2**18
"""Two seconds of a line of 1 Mbit/s: what arrives is a sign of life, and 5 s without one is a loss."""
MAX_UNITS = 2**20
MAX_REASON = 1_000
"""Of why a coordinator sends a worker home, or does not answer: it is printed there, as a part of a line."""
MAX_TEXT = 200
"""Of what a worker says about itself: it is printed here and sent to other workers."""
MAX_FACTS = 100
MAX_SPEED = 1e6
"""Speeds are added and divided: beside one of 1e-300 nothing else is a number any more."""

Buffer = bytes | bytearray | memoryview
_DATA_TAG = bytes([pb.Chunk.DATA_FIELD_NUMBER << 3 | 2])  # protobuf: a field of bytes; its length follows, as a varint

assert sys.byteorder == "little", "big-endian machines are not supported"


@dataclass(frozen=True)
class Layout:
    """Names, dtypes and shapes of a set of tensors, in the order in which they travel."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Tensors) -> "Layout":
        """The layout of `tensors`: the widest dtype first, so that each value lies at a multiple of its size."""
        order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
        return cls(tuple((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order))

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.entries)

    def describe(self) -> list[pb.Tensor]:
        return [pb.Tensor(name=name, dtype=dtype_name(dtype), shape=shape) for name, dtype, shape in self.entries]

    def fits(self, described: Sequence[pb.Tensor]) -> bool:
        """Whether a peer's description is this layout."""
        if len(described) != len(self.entries):  # nothing is built from a list of any length
            return False
        theirs = tuple((item.name, DTYPES.get(item.dtype), tuple(item.shape)) for item in described)
        return theirs == self.entries

    def part(self, described: Sequence[pb.Tensor]) -> "Layout":
        """Of a peer's description, some of these tensors in this order. Raises LinkError if it is none."""
        names = {item.name for item in described[: len(self.entries)]}
        found = Layout(tuple(entry for entry in self.entries if entry[0] in names))
        if not names or not found.fits(described):
            raise _unexpected(Message("tensors of another model"))
        return found

    def require_sizes(self, sizes: Sequence[int]) -> None:
        """Raises LinkError unless `sizes` are the bytes of these tensors, one by one."""
        if list(sizes) != [math.prod(shape) * dtype.itemsize for _, dtype, shape in self.entries]:
            raise _unexpected(Message("tensors of another model"))

    def pack(self, tensors: Tensors, *, memory: "Memory | None" = None) -> memoryview:
        """The bytes of `tensors`, which must have this layout: a copy."""
        packed = (memory or Memory()).take(self.num_bytes)
        for (_, target), (name, *_) in zip(self._views(packed), self.entries, strict=True):
            target.copy_(tensors[name].detach())
        return packed

    def parts(self, tensors: Tensors) -> Iterator[memoryview]:
        """The bytes of `tensors` one by one; without a copy where they are in this machine's memory already."""
        for name, dtype, shape in self.entries:
            tensor = tensors[name].detach().to(device="cpu", dtype=dtype)
            assert tensor.shape == shape
            yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data

    def unpack(self, packed: bytearray | memoryview) -> dict[str, Tensor]:
        """The tensors behind `packed`, without a copy: they keep it alive."""
        return dict(self._views(packed))

    def _views(self, packed: bytearray | memoryview) -> Iterator[tuple[str, Tensor]]:
        first = 0
        for name, dtype, shape in self.entries:
            count = math.prod(shape)
            if count:
                view = torch.frombuffer(packed, dtype=dtype, count=count, offset=first).view(shape)
            else:
                view = torch.empty(shape, dtype=dtype)
            yield name, view
            first += count * dtype.itemsize


class Memory:
    """Large buffers of one size, used again once nothing refers to them any more.

    Fresh memory costs five times a copy: the kernel clears each page when it is first touched. What a buffer holds at
    first is undefined.
    """

    def __init__(self, *, keep: int = 2) -> None:
        """`keep`: how many buffers may wait for their next use."""
        self._keep = keep
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> memoryview:
        """A writable buffer. It comes back when this view, and every tensor made from it, is gone."""
        try:
            block = self._free.pop()
        except IndexError:
            block = torch.empty(num_bytes, dtype=torch.uint8)
        if len(block) != num_bytes:
            block = torch.empty(num_bytes, dtype=torch.uint8)
        view = block.numpy().data
        weakref.finalize(view, self._give_back, block).atexit = False
        return view

    def _give_back(self, block: Tensor) -> None:
        if len(self._free) < self._keep:
            self._free.append(block)


def chunks(name: str, packed: Buffer, *, layout: Layout | None, offset: int = 0) -> Iterator[pb.Chunk]:
    """A whole as chunks from `offset` on; the first one says what it is, and comes even if nothing is left."""
    messages = chunk_messages(name, [packed], layout=layout, num_bytes=len(packed), offset=offset)
    return map(pb.Chunk.FromString, messages)


def chunk_messages(
    name: str, parts: Iterable[Buffer], *, layout: Layout | None, num_bytes: int, offset: int = 0
) -> Iterator[bytes]:
    """Like `chunks`, as serialized messages, of a whole of `num_bytes` that lies in several parts.

    The message is put together here because protobuf would copy the data three times, and this copies it once.
    """
    head = pb.Chunk(name=name, num_bytes=num_bytes, tensors=layout.describe() if layout else [])
    for pieces in _cut(parts, offset):
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        head.crc = crc
        length = _varint(sum(len(piece) for piece in pieces))
        yield b"".join((head.SerializeToString(), _DATA_TAG, length, *pieces))
        head = pb.Chunk()


def _cut(parts: Iterable[Buffer], offset: int) -> Iterator[list[memoryview]]:
    """What is behind `offset`, in pieces that make up a chunk each; at least one chunk."""
    pieces: list[memoryview] = []
    room, begun = CHUNK_BYTES, False
    for part in parts:
        rest = memoryview(part)[offset:]
        offset = max(0, offset - len(part))
        while rest:
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if room == 0:
                yield pieces
                pieces, room, begun = [], CHUNK_BYTES, True
    if pieces or not begun:
        yield pieces


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def chunk_of(data: bytes, *, num_bytes: int = 0) -> pb.Chunk:
    """A chunk of a file; `num_bytes` of the whole in the first one."""
    return pb.Chunk(data=data, crc=zlib.crc32(data), num_bytes=num_bytes)


def file_chunks(path: Path, offset: int, *, end: int | None = None) -> Iterator[pb.Chunk]:
    """A file from `offset` to its end, or to `end`."""
    size = path.stat().st_size if end is None else end
    with open(path, "rb") as file:
        file.seek(min(offset, size))
        first = True
        while data := file.read(min(CHUNK_BYTES, size - file.tell())):
            yield chunk_of(data, num_bytes=size if first else 0)
            first = False
        if first:
            yield chunk_of(b"", num_bytes=size)


@dataclass
class Download:
    """Checks the chunks of a file, of which `received` bytes are there already."""

    num_bytes: int
    received: int = 0

    def checked(self, chunk: pb.Chunk) -> bytes:
        """The chunk's data. Raises LinkError when it is damaged, or more than was announced."""
        data: bytes = chunk.data
        self.received += len(data)
        if zlib.crc32(data) != chunk.crc or self.received > self.num_bytes:
            raise _unexpected(Message("damaged, or longer than announced"))
        return data


@dataclass
class Assembly:
    """Puts chunks together. `num_bytes` is what the receiver expects: a peer that announces another size is refused."""

    num_bytes: int
    layout: Layout | None = None
    memory: Memory = field(default_factory=Memory)
    received: int = 0
    buffer: bytearray | memoryview = field(default_factory=bytearray)
    _begun: bool = False

    def add(self, chunk: pb.Chunk) -> None:
        """Raises LinkError for a chunk that is damaged, or not a part of what was expected."""
        if not self._begun:
            if chunk.num_bytes != self.num_bytes or (self.layout is not None and not self.layout.fits(chunk.tensors)):
                problem = "{found} bytes instead of {expected}, or tensors of another model"
                raise _unexpected(Message(problem, found=chunk.num_bytes, expected=self.num_bytes))
            self.buffer = self.buffer or self.memory.take(self.num_bytes)
            self._begun = True
        elif not chunk.data:
            raise _unexpected(Message("a chunk without data"))
        data: bytes = chunk.data  # once: each access is a copy
        if zlib.crc32(data) != chunk.crc:
            raise _unexpected(Message("its checksum does not match"))
        end = self.received + len(data)
        if end > self.num_bytes:
            raise _unexpected(Message("more data than announced"))
        self.buffer[self.received : end] = data
        self.received = end

    @property
    def complete(self) -> bool:
        return self._begun and self.received == self.num_bytes


def _unexpected(problem: Message) -> LinkError:
    told = "a part of a transfer cannot be used: {problem}"
    return LinkError(told, problem=problem, hint="the other machine is asked again")


def to_coordinator(message: ToCoordinator, *, upload: str = "") -> pb.ToCoordinator:
    """A worker's message for the wire; `upload` names the tensors of a Contribution, which travel by themselves."""
    match message:
        case Hello():
            hello = pb.Hello(protocol=PROTOCOL, speed_hint=message.speed_hint, environment=dict(message.environment))
            return pb.ToCoordinator(hello=hello)
        case Progress():
            return pb.ToCoordinator(progress=pb.Progress(micro_steps=message.micro_steps, part=message.part))
        case Computed():
            return pb.ToCoordinator(computed=pb.Computed(lease_id=message.lease_id))
        case Contribution():
            return pb.ToCoordinator(
                contribute=pb.Contribute(
                    lease_id=message.lease_id,
                    tokens=message.tokens,
                    loss_sum=message.loss_sum,
                    transfer_seconds=message.transfer_seconds,
                    upload=upload,
                    valid=message.valid,
                )
            )
        case Goodbye():
            return pb.ToCoordinator(goodbye=pb.Goodbye(reason=message.reason))


def from_worker(received: pb.ToCoordinator, *, uploads: "Uploads") -> ToCoordinator:
    """What a worker said; a contribution's tensors are taken from its `uploads`. Raises LinkError for nonsense."""
    match received.WhichOneof("kind"):
        case "hello":
            hello = received.hello
            spoken = Message("it speaks protocol {found}, this machine {ours}", found=hello.protocol, ours=PROTOCOL)
            _require(hello.protocol == PROTOCOL, spoken)
            _require(1 / MAX_SPEED < hello.speed_hint < MAX_SPEED, Message("its speed is one that no machine has"))
            facts = islice(hello.environment.items(), MAX_FACTS)
            known = {one_line(key, most=MAX_TEXT): one_line(value, most=MAX_TEXT) for key, value in facts}
            return Hello(speed_hint=hello.speed_hint, environment=known)
        case "progress":
            part = received.progress.part
            return Progress(micro_steps=received.progress.micro_steps, part=part if 0 <= part <= 1 else 0.0)
        case "computed":
            return Computed(lease_id=received.computed.lease_id)
        case "contribute":
            answer = received.contribute
            _require(0 <= answer.transfer_seconds < math.inf, Message("its time is negative"))
            tensors = uploads.take(answer.upload)
            return Contribution(
                lease_id=answer.lease_id,
                tokens=answer.tokens,
                loss_sum=answer.loss_sum,
                transfer_seconds=answer.transfer_seconds,
                tensors=tensors or {},
                valid=answer.valid and tensors is not None and math.isfinite(answer.loss_sum),
            )
        case "goodbye":
            return Goodbye(reason=one_line(received.goodbye.reason, most=MAX_TEXT))
        case _:
            raise LinkError("a message of no known kind", hint="install the same version on both machines")


def to_worker(message: ToWorker, *, parameters: str = "", standbys: Iterable[str] = (), term: int = 0) -> pb.ToWorker:
    """A message to a worker for the wire; `parameters` names the download of a Version, which tells of `standbys`."""
    match message:
        case Version():
            version = pb.Version(version=message.version, parameters=parameters, standbys=standbys, term=term)
            return pb.ToWorker(version=version)
        case Lease():
            return pb.ToWorker(
                lease=pb.Lease(
                    lease_id=message.lease_id,
                    version=message.version,
                    units=message.units,
                    planned_tokens=message.planned_tokens,
                )
            )
        case Stop():
            return pb.ToWorker(stop=pb.Stop(reason=message.reason, refused=message.refused, again=message.again))


def from_coordinator(received: pb.ToWorker) -> ToWorker:
    """What the coordinator said. Raises LinkError for nonsense."""
    match received.WhichOneof("kind"):
        case "version":
            return Version(version=received.version.version, parameters=received.version.parameters)
        case "lease":
            lease = received.lease
            _require(0 < len(lease.units) <= MAX_UNITS and lease.planned_tokens > 0, Message("a lease without units"))
            return Lease(
                lease_id=lease.lease_id,
                version=lease.version,
                units=tuple(lease.units),
                planned_tokens=lease.planned_tokens,
            )
        case "stop":
            stop = received.stop
            return Stop(reason=one_line(stop.reason, most=MAX_REASON), refused=stop.refused, again=stop.again)
        case _:
            raise LinkError("a message of no known kind", hint="install the same version on both machines")


class Uploads:
    """The finished uploads of one worker. Those of one name are one set of tensors, in which each comes once.

    At most two sets are kept: a whole one that was not taken yet, and a newer one of which pieces arrive, while the
    answer that the whole one belongs to is still on its way. A tensor that comes twice begins its set anew.
    Used by two threads: uploads arrive beside the messages.
    """

    def __init__(self, whole: Layout) -> None:
        """`whole`: what a set must hold."""
        self._names = {name for name, *_ in whole.entries}
        self._lock = threading.Lock()
        self._whole: tuple[str, Mapping[str, Tensor]] | None = None
        self._arriving: tuple[str, Mapping[str, Tensor]] | None = None

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        with self._lock:
            if self._whole is not None and self._whole[0] == name:
                self._whole = None
            held = self._arriving[1] if self._arriving is not None and self._arriving[0] == name else {}
            found = name, {**(held if held.keys().isdisjoint(tensors) else {}), **tensors}
            if found[1].keys() == self._names:
                self._whole, self._arriving = found, None
            else:
                self._arriving = found

    def take(self, name: str) -> Mapping[str, Tensor] | None:
        """Once, and only a whole set."""
        with self._lock:
            if self._whole is None or self._whole[0] != name:
                return None
            tensors, self._whole = self._whole[1], None
            return tensors


def version_name(version: int) -> str:
    """What the parameters of a version are called on the wire."""
    return f"version-{version}"


def upload_name(lease_id: int) -> str:
    """What the tensors of an answer are called on the wire, in one piece or in several."""
    return f"lease-{lease_id}"


def _require(condition: bool, problem: Message) -> None:
    if not condition:
        told = "a message cannot be used: {problem}"
        raise LinkError(told, problem=problem, hint="install the same version on both machines")
