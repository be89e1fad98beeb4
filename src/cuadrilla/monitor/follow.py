"""Follows a file of JSON lines that grows: each read costs as much as what has been added since the last one.

No file stays open between two reads, so that the writer can rename it on any system. A line without its end is read
next time. A file that was replaced or shortened is read again from its beginning.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class FileFollower:
    """Reads one file. `tail_bytes`: the first read begins this many bytes before the end."""

    path: Path
    tail_bytes: int | None = None
    _inode: int | None = None
    _offset: int = 0

    def rows(self, *, anew: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
        """The rows added since the last read. `anew` is called first if the file was replaced or shortened."""
        if not self.path.is_file():  # to open a pipe would block
            return
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if self._inode is None:
                self._offset = max(0, status.st_size - self.tail_bytes) if self.tail_bytes else 0
                file.seek(self._offset)
                self._offset += len(file.readline()) if self._offset else 0  # skips the rest of a cut line
            elif self._inode != status.st_ino or status.st_size < self._offset:
                self._offset = 0
                anew()
            self._inode = status.st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield from parsed(line)


def parsed(line: bytes) -> Iterator[dict[str, Any]]:
    """The object in a line, or nothing. NaN and infinities are None."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line, parse_constant=lambda _name: None)
        if isinstance(row, dict):
            yield row


def newest_figures(path: Path) -> dict[str, float]:
    """The newest value of each figure in the last rows of a `metrics.jsonl`."""
    return {key: value for row in FileFollower(path, tail_bytes=2**16).rows() for key, value in figures(row)}


def figures(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in a row, by name."""
    return ((key, value) for key, value in row.items() if type(value) in (int, float))
