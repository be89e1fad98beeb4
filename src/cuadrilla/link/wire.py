"""Encodes messages and tensors of `link/base.py` as bytes, and decodes them. No network I/O.

A message is its name and JSON: `Progress {"micro_steps": 7}`. The bounds in its annotations are checked when it
arrives.

Tensors travel as one blob in safetensors' format, cut into chunks of `CHUNK_BYTES`. A receiver knows from its model
which tensors may arrive (`Layout`), and the blob's header must equal one of the expected headers. So no header is
parsed, the receiver knows where the blob ends, and no peer can make it allocate more memory than the model needs. TLS
protects every byte.

The slow part is fresh memory, which the kernel has to clear, not copying. So large buffers are reused (`Memory`).
"""

import itertools
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from cuadrilla.errors import LinkError, TaskError
from cuadrilla.link.base import Tensors

CHUNK_BYTES = 2**18
"""A chunk takes two seconds at 1 Mbit/s. Each one that arrives is a sign of life; 5 s without one is a lost worker."""
SERVICE = "cuadrilla.crew.Crew"
DEVICE_KEY = "cuadrilla-device"
"""Metadata of a call: the device whose worker calls, if the node has several."""
TOKEN_KEY, INVITE_KEY = "cuadrilla-token", "cuadrilla-invite-bin"
"""Metadata of a call: the node's token; the secret of an invite."""
MAX_MESSAGE_BYTES = 16 * CHUNK_BYTES
PINGS = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),  # else a minute: gRPC 1.85 never begins the time-out before it
)
"""After 5 s of silence each end of a connection pings the other, and ends the connection after 15 s without an answer.
TCP would take a quarter of an hour (Linux: tcp_retries2) to notice that a router forgot it, or that an address changed,
and never notices a frozen process."""
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
          torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8"}  # fmt: skip
"""Dtypes that can be sent and kept in a journal, and their names in safetensors."""

Buffer = bytes | bytearray | memoryview

assert sys.byteorder == "little", "big-endian machines are not supported"


def encode(message: object) -> bytes:
    """A message as bytes. Fields with their default value are left out."""
    kind: Any = type(message)
    return f"{kind.__name__} ".encode() + _adapter(kind).dump_json(message, exclude_defaults=True)


def decode(raw: bytes, *kinds: type) -> Any:
    """The message, which must be of one of these kinds. Raises LinkError for anything else, and for values out of
    bounds."""
    name, _, text = raw.partition(b" ")
    with suppress(ValueError):  # ValidationError is one
        for kind in kinds:
            if kind.__name__.encode() == name:
                return _adapter(kind).validate_json(text, strict=True)
    hint = "install the same version on both machines"
    raise LinkError(
        "a message of an unknown kind, or with invalid values, arrived: {name!r}",
        name=name[:40].decode(errors="replace"),
        hint=hint,
    )


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass(frozen=True)
class Layout:
    """Names, dtypes and shapes of a set of tensors, in the order in which they travel."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Tensors) -> "Layout":
        """The layout of `tensors`. The widest dtype is first, so that each value is aligned to its size."""
        order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, str(tensors[name].dtype), name))
        return cls(tuple((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order))

    @cached_property
    def header(self) -> bytes:
        """The header of safetensors' format: its length, and each tensor's dtype, shape and position as JSON."""
        described, first = {}, 0
        for name, dtype, shape in self.entries:
            last = first + math.prod(shape) * dtype.itemsize
            described[name] = {"dtype": _safetensors_name(dtype), "shape": shape, "data_offsets": [first, last]}
            first = last
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def num_bytes(self) -> int:
        """The size of the whole blob."""
        return len(self.header) + sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * dtype.itemsize for _, dtype, shape in self.entries]

    def pack(self, tensors: Tensors, *, memory: "Memory | None" = None) -> memoryview:
        """A blob with a copy of `tensors`, which must have this layout."""
        packed = (memory or Memory()).take(self.num_bytes)
        packed[: len(self.header)] = self.header
        for name, target in self.views(packed).items():
            target.copy_(tensors[name].detach())
        return packed

    def parts(self, tensors: Tensors) -> Iterator[Buffer]:
        """The blob in parts. Contiguous tensors in CPU memory are not copied."""
        yield self.header
        for name, dtype, shape in self.entries:
            tensor = tensors[name].detach().to(device="cpu", dtype=dtype)
            assert tensor.shape == shape
            yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data

    def views(self, blob: bytearray | memoryview) -> dict[str, Tensor]:
        """The tensors behind the header of a blob, without a copy; they keep it alive."""
        first = len(self.header)
        values = torch.frombuffer(blob, dtype=torch.uint8, offset=first) if len(blob) > first else torch.empty(0).byte()
        parts = zip(self.entries, torch.split(values, self.sizes), strict=True)
        return {name: part.view(dtype).view(shape) for (name, dtype, shape), part in parts}


def _safetensors_name(dtype: torch.dtype) -> str:
    """Raises TaskError for a dtype that cannot be sent or kept."""
    if dtype not in DTYPES:
        raise TaskError(
            "tensors of {dtype} can be neither sent nor kept",
            dtype=str(dtype).removeprefix("torch."),
            hint="these types can: {types}",
            types=", ".join(str(known).removeprefix("torch.") for known in DTYPES),
        )
    return DTYPES[dtype]


class Memory:
    """Large buffers of one size, which are reused when nothing refers to them any more.

    Fresh memory costs five times as much as a copy, because the kernel clears each page at its first use. The content
    of a new buffer is undefined.
    """

    def __init__(self, *, keep: int = 2) -> None:
        """`keep`: the most unused buffers that are kept."""
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


def chunks(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """The bytes of all parts in chunks of `CHUNK_BYTES`. Each byte is copied once."""
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        rest = memoryview(part)
        while rest:
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if room == 0:
                yield b"".join(pieces)
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield b"".join(pieces)


def file_chunks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The bytes of a file from `offset` on."""
    with open(path, "rb") as file:
        file.seek(min(offset, path.stat().st_size))
        yield from iter(partial(file.read, CHUNK_BYTES), b"")


def noise(seconds: float) -> Iterator[bytes]:
    """Random bytes for `seconds`, to measure a link. The chunks are small enough for a slow link to end in time, and
    large enough to fill a fast one."""
    chunk, end = os.urandom(CHUNK_BYTES // 2), time.monotonic() + seconds
    while time.monotonic() < end:
        yield chunk


def received(chunks: Iterator[Buffer], layouts: Sequence[Layout], *, memory: Memory) -> dict[str, Tensor]:
    """The tensors of a blob that arrives in chunks, of which those after it stay unread. Its header must be that of one
    of `layouts`. Raises LinkError."""
    first = next(chunks, b"")
    likely = (each for each in layouts if first and first[: len(each.header)] == each.header[: len(first)])
    if (layout := next(likely, None)) is not None:
        blob, end = memory.take(layout.num_bytes), 0
        try:
            for chunk in itertools.chain([first], chunks):
                end += len(chunk)
                if end <= len(blob):
                    blob[end - len(chunk) : end] = chunk
                if end >= len(blob):
                    break
            if end == len(blob) and blob[: len(layout.header)] == layout.header:
                return layout.views(blob)
        finally:
            del blob  # gRPC keeps the error of a broken call for long, and with it this frame's variables
    template = "the tensors that arrived do not match this model, or are incomplete"
    raise LinkError(template, hint="the transfer is tried again")
