"""Whole runs over Ray: an actor is given jobs, and sends rows and checkpoints back.

Messages, orders and what a coordinator checks are those of the crew link (`link/jobs.py`); an actor is heard, missed
and started again as one that trains together with others (`server.py`). What many jobs need is put into the object
store once, in blocks, and a machine keeps it on its disk by hash. A checkpoint comes back as blocks in the object
store, which are written down here one after the other.
"""

import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayError

from cuadrilla.engines.ray.server import BLOCK_BYTES, FINISH_SECONDS, Attended, RayServer
from cuadrilla.engines.ray.worker import Mailbox, Parcel, RayConnection, RayLink, RayPlace, RayWorker
from cuadrilla.errors import CuadrillaError, LinkError, ResourceError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.grpc_jobs import write_arriving
from cuadrilla.link.jobs import (
    Assignment,
    JobNews,
    JobReceiver,
    Order,
    news_from_wire,
    news_to_wire,
    order_from_wire,
    order_to_wire,
)
from cuadrilla.link.offer import Offer, RunDescription
from cuadrilla.link.served import Receiver
from cuadrilla.link.wire import Layout

KEEP = "keep"
"""The kind of a parcel that is a file: its name, its size as `offset`, its blocks as `refs`."""


@dataclass(kw_only=True)
class JobMailbox(Mailbox):
    """What lies between the actor's threads."""

    orders: "queue.SimpleQueue[Order]" = field(default_factory=queue.SimpleQueue)


class RayJobActor(RayWorker):
    """The actor. `do`: what it does until it is not needed any more; why it ended."""

    def __init__(self, place: RayPlace, description: RunDescription, do: "DoJobs") -> None:
        super().__init__(place, description)
        self._mail = self._job_mail = JobMailbox()
        self._do = do

    def order(self, message: bytes) -> None:
        order = order_from_wire(pb.ToWorker.FromString(message))
        if order is not None:
            self._job_mail.orders.put(order)

    def _work(self) -> str:
        return self._do(self._place, RayJobConnection(self._job_mail, self._description))


class RayJobConnection(RayConnection):
    """The way to who has jobs, over the actor's mailbox."""

    def __init__(self, mail: JobMailbox, description: RunDescription) -> None:
        super().__init__(mail, description)
        self._job_mail = mail

    def session(self, *, parameters: Layout) -> "RayJobLink":
        self._require_welcome()
        return RayJobLink(self._job_mail, parameters=parameters)


DoJobs = Callable[[RayPlace, RayJobConnection], str]


class RayJobLink(RayLink):
    """A session that carries orders, and news of jobs."""

    def __init__(self, mail: JobMailbox, *, parameters: Layout) -> None:
        super().__init__(mail, parameters=parameters)
        self._orders = mail.orders
        while not mail.orders.empty():  # of a session before
            mail.orders.get()

    def next_order(self, *, timeout_seconds: float) -> Order | None:
        """What to do next, if something comes in time."""
        with suppress(queue.Empty):
            return self._orders.get(timeout=timeout_seconds)
        return None

    def tell(self, news: JobNews) -> None:
        """How it goes on with a job."""
        self._mail.outbox.put(Parcel(kind="message", message=news_to_wire(news).SerializeToString()))

    def keep(self, name: str, path: Path) -> None:
        """Send a file of a job's run, by the name of the job and its own in the run. Raises LinkError."""
        refs = tuple(ray.put(block) for block in _blocks_of(path))
        self._mail.outbox.put(Parcel(kind=KEEP, name=name, offset=path.stat().st_size, refs=refs))
        if refusal := self._mail.received.get():
            raise LinkError("{reason}", reason=refusal.decode(), hint="it is asked again")


def _blocks_of(path: Path) -> Iterator["np.ndarray[Any, np.dtype[np.uint8]]"]:
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield np.frombuffer(block, dtype=np.uint8)


class HearsOfJobs(Receiver, JobReceiver, Protocol):
    """Who gives jobs away."""


class RayJobServer(RayServer):
    """Serves who gives jobs away, as `link.grpc_server.CrewServer` does for machines that dial in."""

    _actor = RayJobActor

    def __init__(self, *, receiver: HearsOfJobs, do: DoJobs) -> None:
        nothing = Layout(())
        super().__init__(receiver=receiver, offer=Offer(config="", files={}), parameters=nothing, contribution=nothing)
        self._jobs = receiver
        self._do = do
        self._is_abandoned = False
        self._shared: set[str] = set()
        """Hashes of what more than one job may need."""
        self._blocks: dict[tuple[str, int], Any] = {}
        """References to it, by hash and offset."""

    def order(self, worker: str, order: Order) -> None:
        """Put an order on its way; a worker that has not joined gets nothing."""
        if isinstance(order, Assignment):
            self._shared.update(file.sha256.hex() for file in order.files)
        with self._lock:
            attended = self._workers.get(worker)
        if attended is not None and attended.joined:
            attended.actor.order.remote(order_to_wire(order).SerializeToString())

    def end_kicked(self) -> None:
        """Nobody: who is in a Ray cluster has its token, which cannot be taken back."""

    def adopt_invites(self, _invites: object) -> None:
        """None: Ray's machines are not invited one by one."""

    def abandon(self) -> None:
        """The cluster has gone: nobody can be sent home, and whoever asks Ray waits for it."""
        self._closing.set()
        self._is_abandoned = True

    def close(self, *, finish_seconds: float = FINISH_SECONDS) -> None:
        if not self._is_abandoned:
            super().close(finish_seconds=finish_seconds)

    def refusal(self) -> CuadrillaError | None:
        """Why no worker is there, nor being started: what the last one has said. None: somebody may still come."""
        with self._lock:
            are_there = any(worker.thread and worker.thread.is_alive() for worker in self._workers.values())
        return None if are_there else self._last_error

    def has_places(self) -> bool:
        """Whether any machine has offered itself."""
        with self._lock:
            return bool(self._workers)

    def _more(self) -> tuple[DoJobs]:
        return (self._do,)

    def _description(self) -> RunDescription:
        return replace(super()._description(), takes_jobs=True)

    def _hear(self, worker: Attended, micro_steps: int, parcels: list[Parcel]) -> bool:
        ended = super()._hear(worker, micro_steps, parcels)
        for parcel in parcels:  # it waits for the answer: nothing comes behind it
            if parcel.kind == KEEP:
                self._take_file(worker, parcel)
        return ended

    def _take_message(self, worker: Attended, encoded: bytes) -> None:
        said = pb.ToCoordinator.FromString(encoded)
        if said.WhichOneof("kind") != "job_news":
            super()._take_message(worker, encoded)
        elif worker.joined and self._is_newest(worker):
            self._jobs.news(worker.place.name, news_from_wire(said.job_news))

    def _take_file(self, worker: Attended, parcel: Parcel) -> None:
        refusal = ""
        try:
            write_arriving(worker.place.name, _chunks_of(parcel), self._jobs)
        except (LinkError, ResourceError) as error:
            refusal = error.message
        except RayError as error:  # its process has died, and the blocks with it
            refusal = type(error).__name__
        worker.actor.answer.remote(refusal.encode())

    def _block(self, name: str, offset: int) -> Any:
        """The bytes themselves, or a reference to them, which Ray resolves where they are needed."""
        if (name, offset) in self._blocks:
            return self._blocks[name, offset]
        path = self._jobs.file(name)
        if path is None:
            return b""
        with open(path, "rb") as file:
            file.seek(offset)
            block = file.read(BLOCK_BYTES)
        if name not in self._shared:
            return block
        self._blocks[name, offset] = ray.put(block)
        return self._blocks[name, offset]


def _chunks_of(parcel: Parcel) -> Iterator[pb.Chunk]:
    """As a machine of a crew would send it."""
    for number, ref in enumerate(parcel.refs or (None,)):
        data = b"" if ref is None else ray.get(ref).tobytes()
        chunk = wire.chunk_of(data, num_bytes=0 if number else parcel.offset)
        chunk.name = "" if number else parcel.name
        yield chunk
