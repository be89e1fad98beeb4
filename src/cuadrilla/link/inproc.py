"""The in-process link: a queue per worker, tensors by reference, the coordinator in the caller's own thread.

`InProcServer` is the coordinator's side. A worker's `call` runs the coordinator, one call at a time, and returns when
the resulting messages lie in the workers' queues, so one worker alone needs no second thread and no copy.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Contribution, Lease, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version

Receive = Callable[[str, ToCoordinator], None]


class InProcServer:
    """Connects workers of this process to a coordinator: `receive(worker, message)` is called in their threads.

    `copies`: a version's tensors are copied now, because they may change before the worker has read them.
    """

    def __init__(self, receive: Receive, *, copies: bool = False) -> None:
        self._receive = receive
        self._lock = threading.RLock()
        self._copies = copies
        self._outboxes: dict[str, queue.SimpleQueue[ToWorker]] = {}

    def connect(self, worker: str) -> "InProcLink":
        if worker in self._outboxes:
            problem = "a worker named {worker} is already connected"
            raise LinkError(problem, worker=worker, hint="give each worker its own name")
        self._outboxes[worker] = queue.SimpleQueue()
        return InProcLink(worker, receive=self._receive_one, outbox=self._outboxes[worker], leave=self._disconnect)

    def send(self, worker: str, message: ToWorker) -> None:
        """Put a message into a worker's queue; a worker that has gone gets nothing."""
        outbox = self._outboxes.get(worker)
        if outbox is not None:
            if self._copies and isinstance(message, Version):
                message = replace(message, parameters=_copied(message.parameters))
            outbox.put(message)

    def _receive_one(self, worker: str, message: ToCoordinator) -> None:
        with self._lock:
            self._receive(worker, message)

    def _disconnect(self, worker: str) -> None:
        self._outboxes.pop(worker, None)


def _copied(tensors: TensorRef) -> Tensors:
    assert isinstance(tensors, Mapping)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class InProcLink:
    """A worker's end."""

    def __init__(
        self,
        worker: str,
        *,
        receive: Receive,
        outbox: "queue.SimpleQueue[ToWorker]",
        leave: Callable[[str], None],
    ) -> None:
        self._worker = worker
        self._receive = receive
        self._outbox = outbox
        self._leave = leave
        self._waiting: list[ToWorker] = []
        self._pieces: tuple[int, Tensors] = (0, {})

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution) and self._pieces[0] == message.lease_id:
            message = replace(message, tensors={**self._pieces[1], **message.tensors})
            self._pieces = (0, {})
        self._receive(self._worker, message)

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        sent = self._pieces[1] if self._pieces[0] == lease_id else {}
        self._pieces = (lease_id, {**sent, **piece})

    def next_event(self) -> ToWorker:
        return self._waiting.pop(0) if self._waiting else self._outbox.get()

    def interrupted(self) -> bool:
        while not self._outbox.empty():
            self._waiting.append(self._outbox.get())
        return any(isinstance(message, Lease | Stop) for message in self._waiting)

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, dict)
        return ref

    def close(self) -> None:
        self._leave(self._worker)
