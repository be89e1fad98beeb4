"""A worker as a Ray actor, and its link to the coordinator: calls of the actor instead of a connection.

The coordinator's process is the driver. It calls `deliver` for each message to the worker and holds one call of
`outgoing` open for what the worker has to say; each of the actor's three groups has one thread, so that Ray keeps the
order of the calls in it. Messages are the crew link's own, in its encoding. Tensors lie in the object store as plain
arrays of bytes, beside the message that names them.

The driver owns the actor: it ends with the coordinator. An actor that dies is started again by Ray, and joins anew.

On a machine of its own an actor also does what that machine's owner asks (`engines/courtesy.py`): it leaves its session
in order, waits, and joins again. Who has typed `cuadrilla join` there hears of it through files.
"""

import itertools
import json
import logging
import os
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from cuadrilla.config import Config
from cuadrilla.engines import courtesy as courtesies
from cuadrilla.engines.bundle import fetch
from cuadrilla.engines.courtesy import Courtesy
from cuadrilla.engines.ray.cluster import COURTESY, PROGRESS_FILE, SAID_SUFFIX
from cuadrilla.engines.worker import WorkerOptions, run_worker
from cuadrilla.errors import CuadrillaError, ResourceError
from cuadrilla.home import Home
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import (
    Contribution,
    NodeReport,
    Paused,
    Progress,
    Stop,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.link.inbox import Inbox
from cuadrilla.link.offer import OfferedFile, RunConnection, RunDescription, keep_file
from cuadrilla.link.reports import report_to_wire
from cuadrilla.link.shaped import parse_shape
from cuadrilla.log import TALK, set_up_logging
from cuadrilla.rundir import RunDir, open_private, write_atomic
from cuadrilla.runfile import read_run_config

HEARTBEAT_SECONDS = 1.0
MOST_SAID_BYTES = 2**20
GROUPS = {"in": 1, "out": 1, "work": 1}

log = logging.getLogger(__name__)

Arrays = list[np.ndarray[Any, np.dtype[np.uint8]]]
"""The bytes of a set of tensors, one array for each, in the order of their `Layout`."""


@dataclass(frozen=True, kw_only=True)
class RayPlace:
    """One worker: its name, what it computes with, and where. `node` "": wherever Ray has room."""

    name: str
    speed: float = 1.0
    link: str = ""
    threads: int = 0
    device: str = ""
    """As in `WorkerOptions`; which NVIDIA card is Ray's to choose: "cuda"."""
    num_gpus: int = 0
    """To be reserved."""
    folder: str = ""
    """The run directory, for a worker on the coordinator's own machine; other nodes fetch what they need."""
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What a worker sends: a message of the crew link, "upload" with what it holds, "fetch" with a file's hash and an
    offset, or "ended": the last one of a run.
    """

    kind: str
    message: bytes = b""
    name: str = ""
    offset: int = 0
    refs: tuple[Any, ...] = ()
    """References into the object store: inside a tuple, so that Ray does not resolve them before the call."""


@dataclass(kw_only=True)
class Mailbox:
    """What lies between the actor's threads. Outlives sessions."""

    inbox: Inbox = field(default_factory=Inbox)
    outbox: "queue.SimpleQueue[Parcel]" = field(default_factory=queue.SimpleQueue)
    received: "queue.SimpleQueue[bytes]" = field(default_factory=queue.SimpleQueue)
    """Answers to "upload" (empty) and "fetch" (a block of the file)."""
    versions: dict[str, Any] = field(default_factory=dict)
    """References to the version that was read last and to those announced since, the oldest first."""
    micro_steps: int = 0
    heard_at: float = 0.0
    paused: bool = False
    """The coordinator's owner wants it to wait."""


class RayWorker:
    """The actor. All arguments and results are plain data or dataclasses of this module."""

    def __init__(self, place: RayPlace, description: RunDescription) -> None:
        self._place = place
        self._description = description
        self._mail = Mailbox()

    @ray.method(concurrency_group="in")
    def deliver(self, message: bytes, refs: tuple[Any, ...] = ()) -> None:
        """A message for the training loop; `refs` holds the parameters of a Version."""
        event = wire.from_coordinator(pb.ToWorker.FromString(message))
        self._mail.heard_at = time.monotonic()
        if isinstance(event, Version):
            self._mail.versions[str(event.parameters)] = refs[0]
        self._mail.inbox.put(event)

    @ray.method(concurrency_group="in")
    def answer(self, data: bytes = b"") -> None:
        """The coordinator has fetched an upload, or sends a block of a file."""
        self._mail.heard_at = time.monotonic()
        self._mail.received.put(data)

    @ray.method(concurrency_group="out")
    def outgoing(self) -> tuple[int, list[Parcel]]:
        """What there is to say, at the latest after a second; and how many micro-steps are done: the heartbeat."""
        parcels = []
        try:
            parcels.append(self._mail.outbox.get(timeout=HEARTBEAT_SECONDS))
            while not self._mail.outbox.empty():
                parcels.append(self._mail.outbox.get())
        except queue.Empty:
            pass
        return self._mail.micro_steps, parcels

    @ray.method(concurrency_group="in")
    def pause(self, waits: bool) -> None:
        """No session is to begin until it hears otherwise; one that goes on is ended by a Stop."""
        self._mail.paused = waits

    @ray.method(concurrency_group="in")
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="work", max_task_retries=-1)
    def run(self) -> Mapping[str, str | int]:
        """Work until the run ends. How it ended, or the error that a person should read."""
        try:
            return {"reason": self._work()}
        except CuadrillaError as error:
            return {"error": str(error.message), "hint": str(error.hint), "exit_code": error.exit_code}
        finally:
            self._mail.outbox.put(Parcel(kind="ended"))

    def _work(self) -> str:
        place = self._place
        set_up_logging(RunDir(Path(place.folder)).logs if place.folder else None, worker=place.name)

        def prepare(connection: RunConnection, description: RunDescription) -> tuple[Config, Path]:
            if place.folder:
                return read_run_config(RunDir(Path(place.folder))), Path(place.folder)
            return fetch(connection, description, home=Home.of_user(), report=_report)

        options = WorkerOptions(
            address="",
            connect=lambda _address: RayConnection(self._mail, self._description),
            prepare=prepare,
            shape=parse_shape(place.link, speed=place.speed),
            threads=place.threads,
            device=place.device,
            report=partial(_write_progress, place.name) if PROGRESS_FILE in os.environ else None,
            courtesy=None if place.folder else courtesy_here(),
        )
        with _told_to_owner(place.name):
            return run_worker(options)


class RayConnection:
    """A `RunConnection` over the actor's mailbox."""

    def __init__(self, mail: Mailbox, description: RunDescription) -> None:
        self._mail = mail
        self._description = description

    def describe(self) -> RunDescription:
        self._require_welcome()
        return self._description

    def fetch(self, file: OfferedFile, *, to: Path) -> None:
        keep_file(file, to=to, read=lambda offset: self._blocks(file, offset))

    def session(self, *, parameters: wire.Layout) -> "RayLink":
        self._require_welcome()
        return RayLink(self._mail, parameters=parameters)

    def _require_welcome(self) -> None:
        if self._mail.paused:
            raise Paused("the coordinator has paused this machine", hint="cuadrilla unpause NAME, there")

    def close(self) -> None:
        """Nothing to close: the driver owns the actor."""

    def _blocks(self, file: OfferedFile, offset: int) -> Iterator[bytes]:
        while offset < file.num_bytes:
            self._mail.outbox.put(Parcel(kind="fetch", name=file.sha256.hex(), offset=offset))
            block = self._mail.received.get()
            if not block:  # it has become shorter: the hash will tell
                return
            offset += len(block)
            yield block


class RayLink:
    """A `Link` over the actor's mailbox."""

    def __init__(self, mail: Mailbox, *, parameters: wire.Layout) -> None:
        self._mail = mail
        self._parameters = parameters
        self._memory = wire.Memory(keep=1)
        mail.micro_steps = 0

    @property
    def standbys(self) -> tuple[str, ...]:
        return ()  # the driver owns the actor: it ends with the coordinator

    @property
    def heard_at(self) -> float:
        return self._mail.heard_at

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Progress):
            self._mail.micro_steps = message.micro_steps  # goes with the next heartbeat
        else:
            upload = ""
            if isinstance(message, Contribution):
                upload = wire.upload_name(message.lease_id)
                if message.tensors:
                    self._upload(message.tensors, name=upload)
            encoded = wire.to_coordinator(message, upload=upload).SerializeToString()
            self._mail.outbox.put(Parcel(kind="message", message=encoded))

    def report(self, report: NodeReport) -> None:
        encoded = pb.ToCoordinator(report=report_to_wire(report)).SerializeToString()
        self._mail.outbox.put(Parcel(kind="message", message=encoded))

    def round_trip(self) -> float | None:
        return None  # Ray moves what there is to move

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        self._upload(piece, name=wire.upload_name(lease_id))

    def next_event(self) -> ToWorker:
        return self._mail.inbox.next_event()

    def interrupted(self) -> bool:
        return self._mail.inbox.interrupted()

    def hold(self, reason: str) -> None:
        self._mail.inbox.put(Stop(reason=reason, again=True))

    def farewell(self) -> Stop | None:
        return self._mail.inbox.farewell()

    def _upload(self, tensors: Tensors, *, name: str) -> None:
        """Returns when the coordinator has them: only then is it known how long they travel."""
        ref = ray.put(arrays_of(tensors))
        described = pb.Chunk(tensors=wire.Layout.of(tensors).describe()).SerializeToString()
        self._mail.outbox.put(Parcel(kind="upload", name=name, message=described, refs=(ref,)))
        self._mail.received.get()

    def download(self, ref: TensorRef) -> Tensors:
        versions = self._mail.versions
        arrays = ray.get(versions[str(ref)])
        for older in itertools.takewhile(lambda name: name != ref, list(versions)):
            del versions[older]  # was not read, and will not be
        return tensors_of(arrays, layout=self._parameters, memory=self._memory)

    def close(self) -> None:
        """Nothing to close: the mailbox stays."""


def courtesy_here() -> Courtesy:
    """What this machine's owner asks: as `cuadrilla join` has written it down for the processes of Ray that it starts,
    and whether the work for others is paused here.
    """
    asked = json.loads(os.environ.get(COURTESY, "{}"))
    return Courtesy.from_data(asked, home=Home.of_user())


class _ToOwner(logging.Handler):
    """What a person at this machine should know, for the process that has joined: it reads the end of a file."""

    def __init__(self, worker: str, path: Path) -> None:
        super().__init__(level=logging.INFO)
        self._device, self._path = worker.partition("/")[2], path

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "talk", False):
            return
        line = f"{self._device}  {record.getMessage()}" if self._device else record.getMessage()
        with suppress(OSError), open(self._path, "a", encoding="utf-8", opener=open_private) as file:
            if file.tell() < MOST_SAID_BYTES:
                file.write(f"{line}\n")


@contextmanager
def _told_to_owner(worker: str) -> Iterator[None]:
    """While the block runs: why this worker waits, and that it works again."""
    if PROGRESS_FILE not in os.environ:
        yield
        return
    handler = _ToOwner(worker, Path(os.environ[PROGRESS_FILE] + SAID_SUFFIX))
    loggers = [logging.getLogger(name) for name in (run_worker.__module__, courtesies.__name__)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _report(text: str) -> None:
    log.info("%s", text, extra=TALK)


def _write_progress(worker: str, line: str) -> None:
    if device := worker.partition("/")[2]:
        line = f"{device}  {line}"
    with suppress(ResourceError):  # the node is being taken down, and its folder with it
        write_atomic(Path(os.environ[PROGRESS_FILE]), line, private=True)


def arrays_of(tensors: Tensors) -> Arrays:
    """Without a copy where the tensors are in this machine's memory: the object store makes the only one."""
    return [np.frombuffer(part, dtype=np.uint8) for part in wire.Layout.of(tensors).parts(tensors)]


def tensors_of(arrays: Arrays, *, layout: wire.Layout, memory: wire.Memory) -> Tensors:
    """A copy: what the object store gives cannot be written to, and a merge writes. Raises LinkError."""
    packed = memory.take(layout.num_bytes)
    layout.require_sizes([array.nbytes for array in arrays])
    first = 0
    for array in arrays:
        packed[first : first + array.nbytes] = array.data
        first += array.nbytes
    return layout.unpack(packed)
