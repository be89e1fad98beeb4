"""The journal: a redo log of merged updates between checkpoints.

In a crew each commit appends one record (version, units, tokens, norm and the merged update) and fsyncs it before the
version is announced. If that fails, a checkpoint takes its place. After a crash the newest verified checkpoint and
every record after it give the state of the last commit, bit for bit, because the same code applies the same updates.
The segment `journal/v%08d.log` holds the records that follow the checkpoint of the same name. Segments before the
`keep` newest checkpoints are removed.

    record = length (8) | CRC-32 of all else (4) | header length (4) | header JSON | the update as safetensors
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
from torch import Tensor

from cuadrilla.errors import ResourceError
from cuadrilla.link.wire import Layout
from cuadrilla.rundir import fsync_folder, make_private, storage_errors

_FRAME = struct.Struct("<QII")


@dataclass(frozen=True, kw_only=True)
class JournalRecord:
    """One commit. `update` is empty if the commit skipped it."""

    header: dict[str, Any]
    update: dict[str, Tensor]

    @property
    def version(self) -> int:
        return int(self.header["version"])


class Journal:
    """Appends to the segment of the newest checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def begin_segment(self, version: int) -> None:
        """A checkpoint of `version` is complete: later records go to its own segment."""
        self.close()
        path = _segment(self._folder, version)
        with storage_errors(path):
            make_private(self._folder)
            self._file = open(path, "wb")  # noqa: SIM115  stays open between commits
            fsync_folder(self._folder)

    def append(self, header: Mapping[str, Any], update: Mapping[str, Tensor]) -> None:
        """Append a record, durably. Raises ResourceError, and TaskError for tensors of a dtype that is not kept."""
        assert self._file is not None, "begin_segment first"
        head = json.dumps(header).encode()
        payload = [memoryview(part) for part in Layout.of(update).parts(update)]
        total = len(head) + sum(part.nbytes for part in payload)
        crc = zlib.crc32(head, _length_crc(total, len(head)))
        for part in payload:
            crc = zlib.crc32(part, crc)
        try:
            self._write(_FRAME.pack(total, crc, len(head)), head, *payload)
        except ResourceError:
            with suppress(OSError):  # closing tries the failed write again
                self.close()  # the segment's tail is torn: the next checkpoint begins another segment
            raise

    def _write(self, *parts: bytes | memoryview) -> None:
        assert self._file is not None
        with storage_errors(Path(self._file.name)):
            for part in parts:
                self._file.write(part)
            self._file.flush()
            os.fsync(self._file.fileno())

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def prune(self, *, oldest_checkpoint: int) -> None:
        """Remove the segments that no checkpoint needs any more."""
        for path, version in self._segments():
            if version < oldest_checkpoint:
                path.unlink(missing_ok=True)

    def discard_from(self, version: int) -> None:
        """Remove segments of this version and later ones: leftovers of a history that did not happen."""
        self.close()
        for path, first in self._segments():
            if first >= version:
                path.unlink(missing_ok=True)

    def _segments(self) -> list[tuple[Path, int]]:
        return [(path, int(path.stem[1:])) for path in self._folder.glob("v*.log")]

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def read_records(folder: Path, version: int) -> Iterator[JournalRecord]:
    """Records that follow the checkpoint of `version`, also from segments of later ones. Stops at a torn tail."""
    while (path := _segment(folder, version)).is_file():
        last = version
        with open(path, "rb") as file:
            while (record := _read_record(file, size=path.stat().st_size)) is not None:
                last = record.version
                yield record
        if last == version:
            return
        version = last


def _length_crc(total: int, head_bytes: int) -> int:
    """CRC-32 of the lengths, with which a record's CRC begins: a flipped bit in them must not move the header's end."""
    return zlib.crc32(struct.pack("<QI", total, head_bytes))


def _read_record(file: BinaryIO, *, size: int) -> JournalRecord | None:
    frame = file.read(_FRAME.size)
    if len(frame) < _FRAME.size:
        return None
    total, crc, head_bytes = _FRAME.unpack(frame)
    if total > size - file.tell() or head_bytes > total:
        return None
    head, blob = file.read(head_bytes), file.read(total - head_bytes)
    if zlib.crc32(blob, zlib.crc32(head, _length_crc(total, head_bytes))) != crc:
        return None
    return JournalRecord(header=json.loads(head), update=safetensors.torch.load(blob))


def _segment(folder: Path, version: int) -> Path:
    return folder / f"v{version:08d}.log"
