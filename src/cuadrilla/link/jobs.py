"""Whole runs over the crew link: what a machine is given to train by itself, and what it brings back.

Invariants
* Nothing that a machine says is believed: of its rows numbers are kept and nothing else, and what it sends has the
  name of a file of a checkpoint, a size that was agreed to, and the sum that each chunk announces.
* A file is written under a temporary name; it has its own when every byte is on the disk.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from cuadrilla.errors import LinkError, ResourceError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.grpc_calls import cut_off, reads, refuse, serialize
from cuadrilla.link.grpc_standby import CHECKPOINT_FILE
from cuadrilla.link.offer import OfferedFile
from cuadrilla.messages import Message
from cuadrilla.printable import one_line
from cuadrilla.rundir import finite_json, make_private, storage_errors

COMPLETE, GIVEN_BACK, FAILED = "complete", "given back", "failed"
ENDS = ("", COMPLETE, GIVEN_BACK, FAILED)
METRICS = "metrics.jsonl"
JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
ROW_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_ROWS, MAX_ROW_CHARACTERS, MAX_ROW_KEYS = 500, 4096, 100
MAX_VERSION, MAX_NUMBER = 10**12, 1e300
KEEP_SECONDS = 600.0

Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A run that one machine trains by itself. `config`: JSON of its configuration; `files`: what it needs beside it;
    `begun`: what somebody else has left of it, relative to the run directory."""

    job: str
    config: str
    files: tuple[OfferedFile, ...]
    begun: tuple[OfferedFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Save, and give the job back."""

    job: str


Order = Assignment | Recall


@dataclass(frozen=True, kw_only=True)
class JobNews:
    """How it goes on with a job. `rows`: of its metrics, in their order. `kept`: a checkpoint of this version has been
    sent, every file of it; 0: none. `ended`: one of `ENDS`. `reason`: why it failed."""

    job: str
    rows: tuple[Row, ...] = ()
    kept: int = 0
    ended: str = ""
    reason: str = ""


class JobReceiver(Protocol):
    """Who has given jobs away. Called from the threads of the link."""

    def news(self, worker: str, news: JobNews) -> None: ...

    def place_for(self, worker: str, name: str, *, num_bytes: int) -> Path:
        """Where a file of a worker's job is to lie. Raises LinkError where it is not wanted."""

    def alive(self, worker: str) -> None:
        """A part of a file has come: on a slow line heartbeats wait behind it."""

    def file(self, sha256: str) -> Path | None:
        """One that the workers of jobs may have, by its hash in hexadecimal."""


def order_to_wire(order: Order) -> pb.ToWorker:
    if isinstance(order, Recall):
        return pb.ToWorker(recall=pb.Recall(job=order.job))
    files, begun = _files_to_wire(order.files), _files_to_wire(order.begun)
    return pb.ToWorker(assignment=pb.Assignment(job=order.job, config=order.config, files=files, begun=begun))


def order_from_wire(received: pb.ToWorker) -> Order | None:
    """None: it is another kind of message. Raises LinkError for names that no job has."""
    match received.WhichOneof("kind"):
        case "recall":
            return Recall(job=_job(received.recall.job))
        case "assignment":
            said = received.assignment
            begun = files_from_wire(said.begun)
            wrong = [file.path for file in begun if file.path != METRICS and not CHECKPOINT_FILE.fullmatch(file.path)]
            if wrong:
                raise _nonsense(Message("files that no run has"))
            return Assignment(job=_job(said.job), config=said.config, files=files_from_wire(said.files), begun=begun)
    return None


def news_to_wire(news: JobNews) -> pb.ToCoordinator:
    rows = [json.dumps(row) for row in news.rows]
    said = pb.JobNews(job=news.job, rows=rows, kept=news.kept, ended=news.ended, reason=news.reason)
    return pb.ToCoordinator(job_news=said)


def news_from_wire(said: pb.JobNews) -> JobNews:
    """Raises LinkError for nonsense."""
    if said.ended not in ENDS or len(said.rows) > MAX_ROWS or said.kept > MAX_VERSION:
        raise _nonsense(Message("no news of a job"))
    rows = tuple(row for text in said.rows if (row := usable_row(text)) is not None)
    reason = one_line(said.reason, most=wire.MAX_REASON)
    return JobNews(job=_job(said.job), rows=rows, kept=said.kept, ended=said.ended, reason=reason)


def usable_row(text: str) -> Row | None:
    """The numbers of a line of metrics.jsonl; None if it is none."""
    if len(text) > MAX_ROW_CHARACTERS:
        return None
    try:
        found = finite_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or len(found) > MAX_ROW_KEYS:
        return None
    row = {key: value for key, value in found.items() if ROW_KEY.fullmatch(key) and _is_number(value)}
    version = row.get("version")
    return row if isinstance(version, int) and 0 <= version <= MAX_VERSION else None


def _is_number(value: object) -> bool:
    """Of a size that other programs read, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def files_from_wire(files: Iterable[pb.File]) -> tuple[OfferedFile, ...]:
    return tuple(OfferedFile(path=file.path, sha256=file.sha256, num_bytes=file.num_bytes) for file in files)


def _files_to_wire(files: Iterable[OfferedFile]) -> list[pb.File]:
    return [pb.File(path=file.path, sha256=file.sha256, num_bytes=file.num_bytes) for file in files]


def _job(name: str) -> str:
    if not JOB_NAME.fullmatch(name):
        raise _nonsense(Message("a name that no job has"))
    return name


def _nonsense(problem: Message) -> LinkError:
    told = "a message cannot be used: {problem}"
    return LinkError(told, problem=problem, hint="install the same version on both machines")


def named_chunks(name: str, path: Path) -> Iterator[pb.Chunk]:
    """A file; the first chunk says under which name it is sent. Raises OSError."""
    for number, chunk in enumerate(wire.file_chunks(path, 0)):
        if number == 0:
            chunk.name = name
        yield chunk


class KeepServer:
    """Takes the files of jobs. `receiver` says where they go."""

    def __init__(self, receiver: JobReceiver) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()
        self._sending: set[str] = set()

    def handlers(self, caller: Callable[[Any], str]) -> dict[str, Any]:
        """`caller(context)` names the worker that calls, and ends the call of anybody else."""

        def keep(requests: Iterator[pb.Chunk], context: Any) -> pb.Uploaded:
            worker = caller(context)
            cut_off(context, after=KEEP_SECONDS)
            with self._lock:
                busy = worker in self._sending
                self._sending.add(worker)
            if busy:
                refuse(context, "one upload at a time", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
            try:
                return pb.Uploaded(num_bytes=self._write(worker, requests))
            except (LinkError, ResourceError) as error:
                refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
            finally:
                with self._lock:
                    self._sending.discard(worker)

        handler = grpc.stream_unary_rpc_method_handler(reads(keep, pb.Chunk), response_serializer=serialize)
        return {"Keep": handler}

    def _write(self, worker: str, requests: Iterator[pb.Chunk]) -> int:
        """Raises LinkError, ResourceError."""
        first = next(requests, None)
        if first is None:
            raise LinkError("a call without a message", hint="install the same version there")
        target = self._receiver.place_for(worker, first.name, num_bytes=first.num_bytes)
        part, arriving = target.with_name(f".{target.name}.part"), wire.Download(first.num_bytes)
        make_private(target.parent)
        try:
            with storage_errors(part), open(part, "wb") as file:
                file.write(arriving.checked(first))
                for chunk in requests:
                    self._receiver.alive(worker)
                    file.write(arriving.checked(chunk))
                file.flush()
                os.fsync(file.fileno())
            if arriving.received < arriving.num_bytes:
                raise LinkError("the upload ends early", hint="the worker begins again")
            with storage_errors(target):
                os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
        return arriving.received
