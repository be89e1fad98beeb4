"""Follows a file of JSON lines that grows: each read costs as much as what has been added since the last one.

Invariants
* Nothing stays open between two reads, so that the writer may rename or delete its file on any system.
* A row is given once, as soon as the end of its line is there; until then its beginning is kept, not read again.
* A file that was rotated to `older` is read to its end there, before the new one. One that is shorter than what was
  read, or holds something else at that place, begins anew, and `anew` says so.
* The file may be hostile: what is no regular file is not opened, a line that is no object or has more than
  `MOST_LINE_BYTES` is left out, and one read takes in at most `MOST_READ_BYTES`.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cuadrilla.rundir import require_regular

MOST_LINE_BYTES = 2**20
MOST_READ_BYTES = 2**25
CHUNK_BYTES = 2**20
MARK_BYTES = 64
"""Of the end of what was read: if it is another one next time, this is another file under the same number."""


@dataclass(frozen=True, kw_only=True)
class News:
    """What has come since the last read."""

    rows: list[dict[str, Any]]
    anew: bool = False
    """All that was told before is void."""
    more: bool = False
    """Read again at once: there is more than one read takes in."""


@dataclass
class FileFollower:
    """`older`: where the writer moves a full file. `tail_bytes`: the first read begins so many bytes before the end."""

    path: Path
    older: Path | None = None
    tail_bytes: int | None = None
    bytes_read: int = 0
    """Of all reads."""
    _identity: tuple[int, int] | None = None
    _offset: int = 0
    _mark: bytes = b""
    _rest: bytearray = field(default_factory=bytearray)
    _skips: bool = False

    def read(self) -> News:
        """Never raises for what is in the file, or for one that is missing, locked or gone meanwhile."""
        rows: list[dict[str, Any]] = []
        anew = False
        with contextlib.suppress(OSError), _opened(self.path) as file:
            identity = _identity(file)
            if self._identity not in (None, identity):
                anew = not self._finish(rows)
                self._begin(offset=0)
            elif self._is_another(file):
                anew = True
                self._begin(offset=0)
            elif self._identity is None:
                size = os.fstat(file.fileno()).st_size
                self._begin(offset=max(0, size - self.tail_bytes) if self.tail_bytes is not None else 0)
            self._identity = identity
            return News(rows=rows, anew=anew, more=self._take(file, rows))
        return News(rows=rows, anew=anew)

    def _finish(self, rows: list[dict[str, Any]]) -> bool:
        """Read what is left of a file that has moved to `older`; whether it has."""
        with contextlib.suppress(OSError):
            if self.older is not None:
                with _opened(self.older) as file:
                    if _identity(file) == self._identity and not self._is_another(file):
                        self._take(file, rows)
                        return True
        return False

    def _begin(self, *, offset: int) -> None:
        self._offset, self._mark = offset, b""
        self._rest.clear()
        self._skips = offset > 0  # it begins within a line

    def _is_another(self, file: BinaryIO) -> bool:
        if os.fstat(file.fileno()).st_size < self._offset:
            return True
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) != self._mark

    def _take(self, file: BinaryIO, rows: list[dict[str, Any]]) -> bool:
        """Append the rows from here on; whether there are more than one read may take in."""
        file.seek(self._offset)
        left = MOST_READ_BYTES
        while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            self._offset += len(chunk)
            self.bytes_read += len(chunk)
            self._mark = (self._mark + chunk[-MARK_BYTES:])[-MARK_BYTES:]
            rows += self._rows(chunk)
        return left <= 0

    def _rows(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        first, *others = chunk.split(b"\n")
        self._rest += first
        if others:
            if not self._skips:
                yield from parsed(bytes(self._rest))
            for line in others[:-1]:
                yield from parsed(line)
            self._skips = False
            self._rest[:] = others[-1]
        if self._skips or len(self._rest) > MOST_LINE_BYTES:
            self._skips = True
            self._rest.clear()


def parsed(line: bytes) -> Iterator[dict[str, Any]]:
    """The object in a line, or nothing. Infinities may be in it, and are nobody's number."""
    if len(line) <= MOST_LINE_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line.decode("utf-8", "replace"), parse_constant=_none)
            if isinstance(row, dict):
                yield row


def _none(_name: str) -> None: ...


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _opened(path: Path) -> BinaryIO:
    require_regular(path)
    return open(path, "rb", buffering=0)
