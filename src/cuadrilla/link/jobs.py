"""Jobs over the crew link, whole runs: what a machine is given to do by itself, and what it says of it.

Nothing that it says is believed: rows are numbers and nothing else. As in `base.py`, annotations are the bounds of what
may arrive.
"""

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import AfterValidator, Field

from cuadrilla.link.base import JOB_NAME, MAX_TEXT, Count, OfferedFile, Reason
from cuadrilla.rundir import make_private, open_private, storage_errors

COMPLETE, GIVEN_BACK, FAILED = "complete", "given back", "failed"
ENDS = ("", COMPLETE, GIVEN_BACK, FAILED)
METRICS = "metrics.jsonl"
DEVICE = "device"
"""In the environment of a Hello: of which kind a place's device is."""
ROW_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
CHECKPOINT_FILE = re.compile(
    r"checkpoints/v([0-9]{8,12})/(model\.safetensors|optimizer\.safetensors|state\.json|manifest\.json)"
)
"""One name for each: no digits of other scripts, and no number that takes a minute to read."""
MAX_ROWS, MAX_ROW_KEYS = 500, 100
MAX_VERSION, MAX_WHOLE, MAX_NUMBER = 10**12 - 1, 2**63, 1e300
"""Of a size that other programs read, too, and that can be added up."""

Number = (
    Annotated[int, Field(gt=-MAX_WHOLE, lt=MAX_WHOLE)]
    | Annotated[float, Field(gt=-MAX_NUMBER, lt=MAX_NUMBER, allow_inf_nan=False)]
)
Row = Mapping[str, Number]


def _of_a_step(row: Row) -> Row:
    if not isinstance(row.get("version"), int) or not 0 <= row["version"] <= MAX_VERSION:
        raise ValueError("no version")
    if not all(map(ROW_KEY.fullmatch, row)):
        raise ValueError("a name that is none")
    return row


def _of_one_checkpoint(files: tuple[OfferedFile, ...]) -> tuple[OfferedFile, ...]:
    """The rows, and the files of one checkpoint, each once."""
    names = [file.path for file in files]
    versions = {match[1] if (match := CHECKPOINT_FILE.fullmatch(name)) else "" for name in names if name != METRICS}
    if "" in versions or len(versions) > 1 or len(set(names)) < len(names):
        raise ValueError("files that no run has")
    return files


JobName = Annotated[str, Field(pattern=f"^{JOB_NAME.pattern}$")]
StepRow = Annotated[Row, Field(max_length=MAX_ROW_KEYS), AfterValidator(_of_a_step)]
Begun = Annotated[tuple[OfferedFile, ...], AfterValidator(_of_one_checkpoint)]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A run that one machine trains by itself. `config`: JSON of its configuration; `files`: what it needs beside it;
    `begun`: what somebody else has left of it, relative to the run directory."""

    job: JobName
    config: str
    files: tuple[OfferedFile, ...]
    begun: Begun = ()


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Save, and give the job back."""

    job: JobName


Order = Assignment | Recall


@dataclass(frozen=True, kw_only=True)
class JobNews:
    """News of a job. `rows`: of its metrics, in their order. `kept`: a checkpoint of this version has been
    sent, every file of it; 0: none. `ended`: "" as long as it goes on. `reason`: why it failed."""

    job: JobName
    rows: Annotated[tuple[StepRow, ...], Field(max_length=MAX_ROWS)] = ()
    kept: Annotated[int, Field(ge=0, le=MAX_VERSION)] = 0
    ended: Annotated[str, Field(pattern=f"^({'|'.join(ENDS)})$")] = ""
    reason: Reason = ""


class JobReceiver(Protocol):
    """The coordinator of jobs. Called from the threads of the link."""

    def news(self, worker: str, news: JobNews) -> None: ...

    def keep(self, worker: str, file: "Keep", chunks: Iterator[bytes]) -> None:
        """A file of a worker's job. Raises LinkError where it is not wanted, or not any more, ResourceError."""

    def file(self, sha256: str) -> Path | None:
        """One that the workers of jobs may have, by its hash in hexadecimal."""


def usable_row(text: str) -> Row | None:
    """What another machine takes of a line of metrics.jsonl, which are numbers; None if there is nothing."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    with suppress(ValueError):
        return _of_a_step({key: value for key, value in found.items() if ROW_KEY.fullmatch(key) and _is_number(value)})
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < (MAX_WHOLE if isinstance(value, int) else MAX_NUMBER)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The first message of a file that is sent back, under the name of its job and its own in the run."""

    name: Annotated[str, Field(max_length=MAX_TEXT)]
    num_bytes: Count


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
