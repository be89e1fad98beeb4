"""The beginning of a file that is on its way: `.KEY.part`, and beside it `.KEY.json`, which says how much of it counts.

The state names a number of bytes and their hash, and is written after those bytes are durable. Whatever lies behind
them (a kill, a power cut) is cut off at the next start, and a part with a different hash is thrown away.
"""

import hashlib
import json
import os
from pathlib import Path

from cuadrilla.data.get.origin import Stream
from cuadrilla.rundir import remove_leftovers, storage_errors, write_json

SAVE_EVERY_BYTES = 64 * 2**20
_READ_BYTES = 2**20


class Part:
    """An open part. One process at a time (the folder's lock)."""

    def __init__(self, folder: Path, *, url: str) -> None:
        key = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:16]
        self.path = folder / f".{key}.part"
        self._state = folder / f".{key}.json"
        self._url = url
        self.num_bytes = 0
        self._saved_bytes = 0
        self._digest = hashlib.sha256()
        self.total_bytes: int | None = None
        self.validator = ""
        self.name = ""
        remove_leftovers(self._state)
        self._recall()
        with storage_errors(self.path):
            self._file = open(self.path, "r+b" if self.path.exists() else "w+b")  # noqa: SIM115 - see `close`
            self._file.seek(self.num_bytes)
            self._file.truncate()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def begin(self, stream: Stream, *, name: str) -> None:
        """Take over what a stream announces; one that starts at 0 makes what is here void."""
        if stream.start != self.num_bytes:
            assert stream.start == 0, "an origin goes on where it was asked to, or from the beginning"
            self.num_bytes = 0
            self._digest = hashlib.sha256()
            with storage_errors(self.path):
                self._file.seek(0)
                self._file.truncate()
        self.total_bytes, self.validator, self.name = stream.total_bytes, stream.validator, name
        self.save()

    def write(self, chunk: bytes) -> None:
        """Raises ResourceError when the disk does not take it."""
        with storage_errors(self.path):
            self._file.write(chunk)
        self._digest.update(chunk)
        self.num_bytes += len(chunk)
        if self.num_bytes - self._saved_bytes >= SAVE_EVERY_BYTES:
            self.save()

    def head(self) -> bytes:
        """The first bytes, for a look at their kind."""
        with storage_errors(self.path):
            self._file.seek(0)
            found = self._file.read(1024)
            self._file.seek(self.num_bytes)
        return found

    def save(self) -> None:
        """Make what is here count."""
        with storage_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
        write_json(
            self._state,
            {
                "url": self._url,
                "bytes": self.num_bytes,
                "sha256": self.sha256,
                "total_bytes": self.total_bytes,
                "validator": self.validator,
                "name": self.name,
            },
        )
        self._saved_bytes = self.num_bytes

    def close(self, *, save: bool) -> None:
        """What was saved before stays in any case, see `discard`."""
        try:
            if save:
                self.save()
        finally:
            with storage_errors(self.path):
                self._file.close()

    def discard(self) -> None:
        """Remove a closed part and its state."""
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _recall(self) -> None:
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            num_bytes, sha256, total = int(state["bytes"]), state["sha256"], state["total_bytes"]
            is_ours = state["url"] == self._url and isinstance(total, int | None)
            validator, name = str(state["validator"]), str(state["name"])
            digest = _hash_of(self.path, num_bytes) if is_ours else None
        except (OSError, ValueError, TypeError, KeyError):
            return
        if digest is not None and digest.hexdigest() == sha256 and validator:
            self.num_bytes = self._saved_bytes = num_bytes
            self._digest, self.total_bytes, self.validator, self.name = digest, total, validator, name


def _hash_of(path: Path, num_bytes: int) -> "hashlib._Hash | None":
    """Of the first `num_bytes`, or None if there are fewer. Raises OSError."""
    digest = hashlib.sha256()
    left = num_bytes
    with open(path, "rb") as file:
        while left > 0:
            chunk = file.read(min(left, _READ_BYTES))
            if not chunk:
                return None
            digest.update(chunk)
            left -= len(chunk)
    return digest
