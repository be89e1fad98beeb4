"""Files on the link: what the coordinator offers, by hash; what nodes send back of jobs."""

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cuadrilla.link.base import Count, Sha256, Text
from cuadrilla.rundir import make_private, open_private, storage_errors

MAX_PATH = 1000


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a node needs to become a worker of this run: its configuration as JSON, and files by relative path."""

    config: str
    files: Mapping[str, tuple[Path, bytes]]
    """Relative path → where it lies here, and its SHA-256."""


@dataclass(frozen=True, kw_only=True)
class OfferedFile:
    path: Annotated[str, Field(max_length=MAX_PATH)]
    sha256: Sha256
    num_bytes: Count


def offered(files: Mapping[str, tuple[Path, bytes]]) -> tuple[OfferedFile, ...]:
    """What is said of files that lie here."""
    return tuple(
        OfferedFile(path=name, sha256=sha256, num_bytes=here.stat().st_size) for name, (here, sha256) in files.items()
    )


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What the coordinator trains: its resolved configuration as JSON, and the files a worker needs."""

    config: str
    files: tuple[OfferedFile, ...]
    cuadrilla: Text = ""
    """The coordinator's version."""
    term: Count = 0
    """As in `Version`."""
    takes_jobs: bool = False
    """Nothing is trained together there: a session is given whole runs (`link/jobs.py`)."""


def take_file(target: Path, chunks: Iterable[bytes]) -> None:
    """Write what arrives; it has its name when every byte is on the disk. Raises ResourceError, and as `chunks`."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    make_private(target.parent)
    try:
        with storage_errors(target):
            with open(part, "wb", opener=open_private) as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
