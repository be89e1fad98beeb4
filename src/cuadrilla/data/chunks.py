"""Finished pieces of work: arrays and a header in a `.npz`, named by what they were made from.

A file has its name only when it is whole: it is renamed at the end. There is no fsync, and a zip file knows the CRC of
each array: after a power cut one that cannot be read is made again.
"""

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.rundir import storage_errors

KEY_BYTES = 16
_HEADER = "header"


def key_of(*parts: bytes | str) -> str:
    """A name for what is made from `parts`."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


class Chunk:
    """The content of one file, or of its path: arrays are read when they are asked for."""

    def __init__(self, file: Path | bytes) -> None:
        self._file = file

    def array(self, name: str) -> NDArray[Any]:
        """One array. Raises ResourceError if the file is gone."""
        if isinstance(self._file, bytes):
            return np.asarray(np.load(io.BytesIO(self._file))[name])
        with storage_errors(self._file), np.load(self._file) as arrays:
            return np.asarray(arrays[name])

    @property
    def header(self) -> dict[str, Any]:
        """What the writer wanted to say."""
        value: dict[str, Any] = json.loads(self.array(_HEADER).tobytes())
        return value


def chunk_bytes(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The content of a file."""
    buffer = io.BytesIO()
    named: dict[str, Any] = {_HEADER: np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays}
    np.savez(buffer, **named)
    return buffer.getvalue()


def write_chunk(path: Path, raw: bytes) -> None:
    """Write a whole file or none. Raises ResourceError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            temporary.write_bytes(raw)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Whether the file is there with the bytes that were written."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return False
