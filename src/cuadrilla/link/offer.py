"""What the coordinator offers a node that wants to work for its run, and how the node keeps it: by hash."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Link, NodeReport, Stop
from cuadrilla.link.wire import CHUNK_BYTES, Layout
from cuadrilla.rundir import fsync_folder, storage_errors


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a node needs to become a worker of this run: its configuration as JSON, and files by relative path."""

    config: str
    files: Mapping[str, tuple[Path, bytes]]
    """Relative path → where it lies here, and its SHA-256."""


@dataclass(frozen=True, kw_only=True)
class OfferedFile:
    path: str
    sha256: bytes
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What the coordinator trains: its resolved configuration as JSON, and the files a worker needs."""

    config: str
    files: tuple[OfferedFile, ...]
    cuadrilla: str = ""
    """The coordinator's version, if it says so."""
    takes_jobs: bool = False
    """Nothing is trained together there: a session is given whole runs (`link/jobs.py`)."""
    run: str = ""
    """Which one this node is to take part in, of several that are trained there; "": there is no other."""


class Session(Link, Protocol):
    """A link that knows when it last heard something."""

    @property
    def heard_at(self) -> float:
        """When the coordinator last said something, in monotonic seconds; 0 for never."""

    @property
    def standbys(self) -> tuple[str, ...]:
        """Where the run goes on if its coordinator is gone for good, as far as it has said."""

    def report(self, report: NodeReport) -> None:
        """Tell how this machine is. From any thread; raises LinkError when the session has broken."""

    def round_trip(self) -> float | None:
        """Seconds of a question and its answer just now; None where that is not known, or something else travels."""

    def hold(self, reason: str) -> None:
        """Leave the session in order at the next moment, as if its coordinator had said so. From any thread."""

    def farewell(self) -> Stop | None:
        """The Stop with which the coordinator ended this session, if it did: what failed after it does not matter."""


class RunConnection(Protocol):
    """A node's way to a run, whatever carries it: the crew link, or Ray. All methods raise LinkError."""

    def describe(self) -> RunDescription: ...

    def fetch(self, file: OfferedFile, *, to: Path) -> None:
        """Download a file and check its hash."""

    def session(self, *, parameters: Layout) -> Session:
        """A new session; `parameters` is what a version of this run's model looks like."""

    def close(self) -> None: ...


def keep_file(file: OfferedFile, *, to: Path, read: Callable[[int], Iterator[bytes]]) -> None:
    """Write what `read(offset)` yields to `to` and check its hash; a broken download goes on where it stopped.

    Raises LinkError, ResourceError.
    """
    part = to.with_name(f".{to.name}.{file.sha256.hex()[:16]}.part")
    with storage_errors(to), open(part, "ab") as target:
        if target.tell() < file.num_bytes or file.num_bytes == 0:
            for data in read(target.tell()):
                target.write(data)
    digest = hashlib.sha256()
    with open(part, "rb") as source:
        while block := source.read(CHUNK_BYTES):
            digest.update(block)
    if digest.digest() != file.sha256:
        part.unlink()
        hint = "try again; the coordinator's file may have changed"
        raise LinkError("{path} arrived damaged", path=file.path, hint=hint)
    part.replace(to)
    fsync_folder(to.parent)
