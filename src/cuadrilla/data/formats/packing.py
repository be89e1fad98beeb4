"""The bytes of a file, unpacked on the way (gz, zst, xz, bz2), in pieces of `CHUNK_BYTES`.

Invariants
* No step makes more than 32 MiB of output from what it was given, so a bomb is met while it is small.
* Output beyond `MAX_RATIO` times the packed size is refused once there are more than `RATIO_FREE_BYTES` of it, and
  output beyond `MAX_UNPACKED_BYTES` always.
* A stream that ends too early, or has anything but zeros behind it, is an error and not an end.
"""

import bz2
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cuadrilla.errors import DataError, EnvironmentProblem
from cuadrilla.messages import Message
from cuadrilla.rundir import require_regular

CHUNK_BYTES = 2**20
MAX_UNPACKED_BYTES = 2**38
MAX_RATIO = 200
"""Text packs to a third or a fifth; lists and logs to a fiftieth. gzip reaches 1,000, zstandard 30,000."""
RATIO_FREE_BYTES = 2**26
PACKINGS = (".gz", ".zst", ".xz", ".bz2")
INSTALL = 'pip install "cuadrilla[data]"'

_ZST_STEP_BYTES = 2**10  # a zstandard block of 4 bytes can hold 128 KiB: 1 KiB of input gives 32 MiB at most
_ZST_WINDOW_BYTES = 2**27
_XZ_MEMORY_BYTES = 2**28


class Digest(Protocol):
    """What hashlib returns."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The hash of all bytes so far."""


@dataclass(kw_only=True)
class Budget:
    """How much may still come out of a packed file."""

    where: str
    packed_bytes: int
    unpacked_bytes: int = 0

    def spend(self, num_bytes: int) -> None:
        """Raises DataError if so much cannot be text that somebody packed."""
        self.unpacked_bytes += num_bytes
        allowed = min(MAX_UNPACKED_BYTES, max(RATIO_FREE_BYTES, MAX_RATIO * self.packed_bytes))
        if self.unpacked_bytes > allowed:
            raise DataError(
                "{where} unpacks to more than {allowed:,} bytes, from {packed:,}: a bomb, or not text",
                where=self.where,
                allowed=allowed,
                packed=self.packed_bytes,
                hint="if you trust it, unpack it yourself and give the text",
            )


def chunks(path: Path, digest: Digest | None = None) -> Iterator[bytes]:
    """The bytes as they lie on disk; `digest` learns all of them. Raises DataError if they cannot be read."""
    try:
        require_regular(path)
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if digest is not None:
                    digest.update(chunk)
                yield chunk
    except OSError as error:
        raise DataError(
            "cannot read {path}: {reason}",
            path=path,
            reason=error.strerror or error,
            hint="check that the file exists and that you may read it",
        ) from error


def unpacked(path: Path, packing: str, *, digest: Digest | None = None) -> Iterator[bytes]:
    """The bytes that `path` holds, unpacked if `packing` is one of `PACKINGS`; `digest` learns the packed ones.

    Raises DataError for damage and for a bomb, EnvironmentProblem if zstandard is not installed.
    """
    if not packing:
        return chunks(path, digest)
    return _even(_guarded(path, packing, digest))


def _guarded(path: Path, packing: str, digest: Digest | None) -> Iterator[bytes]:
    raw = chunks(path, digest)
    budget = Budget(where=str(path), packed_bytes=size_of(path))
    try:
        for piece in _streams(raw, packing):
            budget.spend(len(piece))
            yield piece
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
        raise DataError(
            "{path} is damaged or not {packing}: {reason}",
            path=path,
            packing=packing.removeprefix("."),
            reason=reason_of(error),
            hint="fetch it again, or leave it out",
        ) from error


def reason_of(error: Exception) -> str:
    """What was said when it was raised: one of our messages as such, or else its text."""
    said = error.args[0] if error.args else None
    return said if isinstance(said, Message) else str(error)


def size_of(path: Path) -> int:
    """Bytes on disk. Raises DataError if it is not there."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(
            "cannot read {path}: {reason}", path=path, reason=error.strerror, hint="check that the file exists"
        ) from error


def _streams(raw: Iterable[bytes], packing: str) -> Iterator[bytes]:
    """Unpack streams that follow one another, as `cat a.gz b.gz` makes them; zeros between them are padding."""
    stream: _Stream | None = None
    is_first = True
    for data in raw:
        while data:
            if stream is None:
                data = data if is_first else data.lstrip(b"\0")
                if not data:
                    break
                stream, is_first = _open_stream(packing), False
            yield from stream.feed(data)
            data = stream.unused if stream.ended else b""
            stream = None if stream.ended else stream
    if stream is not None or is_first:
        raise EOFError(Message("it ends in the middle"))


class _Stream(Protocol):
    ended: bool
    unused: bytes
    """What followed the end of the stream in the data fed last."""

    def feed(self, data: bytes) -> Iterator[bytes]: ...


def _open_stream(packing: str) -> _Stream:
    match packing:
        case ".gz":
            return _Gzip()
        case ".zst":
            return _Zstandard()
        case ".xz":
            return _Block(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES))
        case _:
            assert packing == ".bz2", packing
            return _Block(bz2.BZ2Decompressor())


class _Gzip:
    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)  # 31: with gzip header and checksum
        self.ended = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        full = True
        while (data or full) and not self.ended:  # after a full piece, more may wait without any input left
            piece = self._decoder.decompress(data, CHUNK_BYTES)
            data = self._decoder.unconsumed_tail
            full = len(piece) == CHUNK_BYTES
            self.ended = self._decoder.eof
            yield piece
        self.unused = self._decoder.unused_data


class _Block:
    """bz2 and xz: their decoders have the same methods."""

    def __init__(self, decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor) -> None:
        self._decoder = decoder
        self.ended = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or not (self._decoder.needs_input or self.ended):
            piece = self._decoder.decompress(data, CHUNK_BYTES)
            data = b""
            self.ended = self._decoder.eof
            yield piece
        self.unused = self._decoder.unused_data


class _Zstandard:
    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise EnvironmentProblem("reading .zst needs zstandard, which is not installed", hint=INSTALL) from error
        self._error = zstandard.ZstdError
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES).decompressobj()
        self.ended = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZST_STEP_BYTES):
            step = data[start : start + _ZST_STEP_BYTES]
            try:
                yield self._decoder.decompress(step)
            except self._error as error:
                raise ValueError(error) from error
            if self._decoder.eof:
                self.ended = True
                self.unused = self._decoder.unused_data + data[start + _ZST_STEP_BYTES :]
                return


def _even(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of CHUNK_BYTES: the first one decides an encoding, whatever unpacked it."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size < CHUNK_BYTES:
            continue
        joined = b"".join(held)
        whole = size - size % CHUNK_BYTES
        for start in range(0, whole, CHUNK_BYTES):
            yield joined[start : start + CHUNK_BYTES]
        held, size = [joined[whole:]], size - whole
    if size:
        yield b"".join(held)
