"""Messages about jobs: whole runs, each of which one machine trains by itself.

As in `base.py`, annotations bound what may arrive. The receiver of a checkpoint compares it with its manifest.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import AfterValidator, Field

from cuadrilla.link.base import OfferedFile, RunDescription, Text

METRICS = "metrics.jsonl"
JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""The names of jobs on the link, and in file names."""
CHECKPOINT_PATH = re.compile(
    r"checkpoints/v([0-9]{8}|[1-9][0-9]{8,11})/(model\.safetensors|optimizer\.safetensors|state\.json|manifest\.json)"
)


def _of_a_run(file: OfferedFile) -> OfferedFile:
    if file.path != METRICS and not CHECKPOINT_PATH.fullmatch(file.path):
        raise ValueError("a file that no run has")
    return file


JobName = Annotated[str, Field(pattern=f"^{JOB_NAME.pattern}$")]
RunFile = Annotated[OfferedFile, AfterValidator(_of_a_run)]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A run that one machine trains by itself. `begun`: files of its run directory, if another machine has trained a
    part of it."""

    job: JobName
    run: RunDescription
    begun: tuple[RunFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Asks the machine to save, and to give the job back."""

    job: JobName


Order = Assignment | Recall


@dataclass(frozen=True, kw_only=True)
class JobNews:
    """News of a job. `rows`: complete lines of its metrics. A job that has `ended` is `complete`, or failed or was
    `lost` for a `reason`, or is given back."""

    job: JobName
    rows: str = ""
    ended: bool = False
    complete: bool = False
    lost: bool = False
    reason: Text = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A file of a checkpoint is sent back, in a call; its bytes follow. The manifest comes after the other files."""

    job: JobName
    path: Annotated[str, Field(pattern=f"^{CHECKPOINT_PATH.pattern}$")]
    """In the run directory."""


class JobReceiver(Protocol):
    """The coordinator of jobs. The threads of the link call it."""

    def keep(self, worker: str, file: CheckpointFile, chunks: Iterator[bytes]) -> None:
        """Save a file of a worker's job. Raises ResourceError."""

    def file(self, worker: str, path: str) -> Path | None:
        """The file of this name in the worker's job."""
