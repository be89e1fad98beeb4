"""The bytes of a file, unpacked on the way by the library of each format, and hashed as they lie on disk.

Streams that follow one another are read, as `cat a.gz b.gz` makes them; one that ends too early is an error and not an
end.
"""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, cast

from cuadrilla.errors import DataError, EnvironmentProblem

CHUNK_BYTES = 2**20
MAX_UNPACKED_BYTES = 20 * 10**9
"""Of one file, whatever it is packed in. It is read in pieces, so this bounds time and disk, not memory."""
PACKINGS = (".gz", ".zst", ".xz", ".bz2")
INSTALL = 'pip install "cuadrilla[data]"'


class Digest(Protocol):
    """What hashlib returns."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""


class SeenFile(io.RawIOBase):
    """A file of which `see` is shown every byte that is read."""

    def __init__(self, file: IO[bytes], see: Callable[[memoryview], None]) -> None:
        self._file = cast(io.BufferedIOBase, file)
        self._see = see

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Bytes read; 0 at the end."""
        count = self._file.readinto(buffer)
        self._see(memoryview(buffer)[:count])
        return count


class Limit:
    """How much may still come out of a packed file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_bytes = MAX_UNPACKED_BYTES

    def spend(self, data: memoryview | bytes) -> None:
        """Raises DataError if it is too much."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise DataError(
                "{path} unpacks to more than {most:,} bytes",
                path=self._path,
                most=MAX_UNPACKED_BYTES,
                hint="if you trust it, unpack it yourself and give the text in several files",
            )

    def watching(self, file: IO[bytes]) -> IO[bytes]:
        """`file`, counted."""
        return io.BufferedReader(SeenFile(file, self.spend), CHUNK_BYTES)


@contextmanager
def opened(path: Path, packing: str, digest: Digest) -> Iterator[IO[bytes]]:
    """The bytes that `path` holds, unpacked if `packing` is one of `PACKINGS`; `digest` learns all the packed ones.

    Reading raises DataError beyond the limit, and what the libraries raise for damage.
    """
    with open(path, "rb", buffering=0) as file:
        raw = io.BufferedReader(SeenFile(cast(IO[bytes], file), digest.update), CHUNK_BYTES)
        yield Limit(path).watching(_unpacked(raw, packing)) if packing else raw
        while raw.read(CHUNK_BYTES):
            pass


def _unpacked(raw: IO[bytes], packing: str) -> IO[bytes]:
    match packing:
        case ".gz":
            return cast(IO[bytes], gzip.open(raw))
        case ".xz":
            return lzma.open(raw)
        case ".bz2":
            return cast(IO[bytes], bz2.open(raw))
    try:
        import pyarrow as pa
    except ImportError as error:
        raise EnvironmentProblem("reading .zst needs pyarrow, which is not installed", hint=INSTALL) from error
    return cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"))
