"""Finished pieces of work on disk: named by what they were made from, verified before they are used again.

A file is its BLAKE2 digest, the length of a JSON header, the header, then arrays one after another. A reader that wants
one array reads only that. There is no fsync: after a power cut a digest says which files are whole.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.errors import LinkError
from cuadrilla.rundir import storage_errors

DIGEST_BYTES = 16
_LENGTH_BYTES = 4


def key_of(*parts: bytes | str) -> str:
    """A name for what is made from `parts`."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Chunk:
    """An open door to one file; holds nothing but its header."""

    path: Path
    header: dict[str, Any]
    """What the writer wanted to say; `arrays` has [name, dtype, shape] of each array."""
    start: int
    """Where the first array begins."""

    def array(self, name: str, *, rows: slice | None = None) -> NDArray[Any]:
        """One array, or some rows of it. Raises ResourceError if the file is gone."""
        offset = self.start
        for other, code, shape in self.header["arrays"]:
            dtype = np.dtype(code)
            if other != name:
                offset += dtype.itemsize * int(np.prod(shape))
                continue
            width = int(np.prod(shape[1:]))
            first, end, _ = (rows or slice(None)).indices(shape[0])
            with storage_errors(self.path):
                found = np.fromfile(
                    self.path, dtype=dtype, count=(end - first) * width, offset=offset + first * width * dtype.itemsize
                )
            return found.reshape(end - first, *shape[1:])
        raise KeyError(name)


def write_chunk(path: Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a whole file or none. Raises ResourceError."""
    shapes = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": shapes}, separators=(",", ":")).encode()
    parts: list[bytes | memoryview] = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
    parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    _place(path, [digest.digest(), *parts])


def place_chunk(path: Path, raw: bytes) -> None:
    """Write what another machine has written. Raises LinkError if it was damaged on the way, ResourceError."""
    if raw[:DIGEST_BYTES] != hashlib.blake2b(raw[DIGEST_BYTES:], digest_size=DIGEST_BYTES).digest():
        raise LinkError(
            "a piece of the preparation came damaged from another machine",
            hint="run the same command again; if it happens again, test the memory and network of that machine",
        )
    _place(path, [raw])


def _place(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            with open(temporary, "wb") as file:
                for part in parts:
                    file.write(part)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def open_chunk(path: Path) -> Chunk:
    """A file that this process knows to be whole. Raises ResourceError if it is gone."""
    with storage_errors(path), open(path, "rb") as file:
        file.seek(DIGEST_BYTES)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return Chunk(path, json.loads(file.read(length)), DIGEST_BYTES + _LENGTH_BYTES + length)


def is_whole(path: Path) -> bool:
    """Whether the file is there with the bytes that were written."""
    try:
        with open(path, "rb") as file:
            expected = file.read(DIGEST_BYTES)
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            while part := file.read(2**20):
                digest.update(part)
    except OSError:
        return False
    return digest.digest() == expected
