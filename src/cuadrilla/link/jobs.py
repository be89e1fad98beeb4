"""Jobs over the crew link, whole runs: what a machine is given to do by itself, and what it says of it.

As in `base.py`, annotations are the bounds of what may arrive. What a checkpoint holds is compared with its manifest by
whoever takes it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import AfterValidator, Field

from cuadrilla.link.base import JOB_NAME, Count, OfferedFile, Text

COMPLETE, GIVEN_BACK, FAILED, LOST = "complete", "given back", "failed", "lost"
METRICS = "metrics.jsonl"
DEVICE = "device"
"""In the environment of a Hello: of which kind a place's device is."""
CHECKPOINT_FILE = re.compile(
    r"checkpoints/v([0-9]{8,12})/(model\.safetensors|optimizer\.safetensors|state\.json|manifest\.json)"
)


def _of_a_run(file: OfferedFile) -> OfferedFile:
    if file.path != METRICS and not CHECKPOINT_FILE.fullmatch(file.path):
        raise ValueError("a file that no run has")
    return file


JobName = Annotated[str, Field(pattern=f"^{JOB_NAME.pattern}$")]
RunFile = Annotated[OfferedFile, AfterValidator(_of_a_run)]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A run that one machine trains by itself. `config`: JSON of its configuration; `files`: what it needs beside it;
    `begun`: what somebody else has left of it, relative to the run directory."""

    job: JobName
    config: str
    files: tuple[OfferedFile, ...]
    begun: tuple[RunFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Save, and give the job back."""

    job: JobName


Order = Assignment | Recall


@dataclass(frozen=True, kw_only=True)
class JobNews:
    """News of a job. `rows`: whole lines of its metrics, to its `version`. `kept`: a checkpoint of this version has
    been sent, every file of it; 0: none. `ended`: "" as long as it goes on. `reason`: why it failed, or was lost."""

    job: JobName
    rows: str = ""
    version: Count = 0
    kept: Count = 0
    ended: Text = ""
    reason: Text = ""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The first message of a file that is sent back, under the name of its job and its own in the run."""

    name: str


class JobReceiver(Protocol):
    """The coordinator of jobs. Called from the threads of the link."""

    def news(self, worker: str, news: JobNews) -> None: ...

    def keep(self, worker: str, file: Keep, chunks: Iterator[memoryview]) -> None:
        """A file of a worker's job. Raises LinkError where it is not wanted, or not any more, ResourceError."""

    def file(self, sha256: str) -> Path | None:
        """One that the workers of jobs may have, by its hash in hexadecimal."""
