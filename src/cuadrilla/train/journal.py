"""The journal: a redo log of merged updates between checkpoints, one file for each commit.

In a crew each commit writes a record (version, units, tokens, norm and the merged update), which is durable before the
version is announced. If that fails, a checkpoint takes its place. After a crash the newest verified checkpoint and
every record after it give the state of the last commit, bit for bit, because the same code applies the same updates.
Records that the `keep` newest checkpoints do not need are removed.

    journal/v%08d.step = CRC-32 of all else (4) | header length (4) | header JSON | the update as safetensors

The name is the version to which the record leads. `after` in the header is the CRC of the record before it, also across
checkpoints, which hold the CRC of the last record. So a record counts only in the history in which it was made: what
is damaged or missing ends that history, and a record of another one does not follow.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from cuadrilla.link.wire import Layout
from cuadrilla.rundir import fsync_folder, make_private, storage_errors, write_atomic


@dataclass(frozen=True, kw_only=True)
class JournalRecord:
    """One commit. `update` is empty if the commit skipped it. `crc`: of the record, to which the next one refers."""

    header: dict[str, Any]
    update: dict[str, Tensor]
    crc: int

    @property
    def version(self) -> int:
        return int(self.header["version"])

    def follows(self, version: int, *, after: int) -> bool:
        """Whether it was made from this version, to which the record with the CRC `after` led."""
        return (self.version - int(self.header["steps"]), int(self.header["after"])) == (version, after)


def append(folder: Path, header: Mapping[str, Any], update: Mapping[str, Tensor], *, after: int) -> int:
    """Write a record, durably; return its CRC. `header`: at least `version`, and `steps` from the version before;
    `after`: CRC of the record before, 0 for a run's first. Raises ResourceError, and TaskError for tensors of a dtype
    that is not kept.
    """
    head = json.dumps({**header, "after": after}).encode()
    parts: list[bytes | memoryview] = [len(head).to_bytes(4, "little"), head]
    parts += map(memoryview, Layout.of(update).parts(update))
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    make_private(folder)
    write_atomic(folder / f"v{header['version']:08d}.step", [crc.to_bytes(4, "little"), *parts], private=True)
    return crc


def read_records(folder: Path, version: int, *, after: int) -> Iterator[JournalRecord]:
    """The records that follow `version`, in order. `after`: CRC of the record that led to it, which its checkpoint
    holds."""
    for path in _record_files(folder):
        record = _read_record(path) if _version_of(path) > version else None
        if record is not None and record.follows(version, after=after):
            version, after = record.version, record.crc
            yield record


def remove_records(folder: Path, *, unwanted: Callable[[int], bool]) -> None:
    """Remove the records that lead to `unwanted` versions, durably, and what a killed process left of its last write.
    Raises ResourceError."""
    with storage_errors(folder):
        removed = [path for path in _record_files(folder) if unwanted(_version_of(path))]
        removed += folder.glob(".v*.tmp")
        for path in removed:
            path.unlink(missing_ok=True)
        if removed:
            fsync_folder(folder)


def _read_record(path: Path) -> JournalRecord | None:
    """The record in a file; None if it is damaged."""
    raw = path.read_bytes()
    crc, end = int.from_bytes(raw[:4], "little"), 8 + int.from_bytes(raw[4:8], "little")
    if len(raw) < 8 or zlib.crc32(memoryview(raw)[4:]) != crc:
        return None
    return JournalRecord(header=json.loads(raw[8:end]), update=safetensors.torch.load(raw[end:]), crc=crc)


def _record_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("v*.step"), key=_version_of)


def _version_of(path: Path) -> int:
    return int(path.stem[1:])
