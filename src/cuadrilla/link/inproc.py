"""The in-process link: a queue per worker, tensors by reference, the coordinator in the caller's own thread.

`InProcServer` is the coordinator's side. A worker's `call` runs the coordinator, one call at a time, and returns when
the resulting messages lie in the workers' queues, so one worker alone needs no second thread and no copy.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Contribution, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.link.inbox import Inbox

Receive = Callable[[str, ToCoordinator], None]


class InProcServer:
    """Connects workers of this process to a coordinator: `receive(worker, message)` is called in their threads.

    `copies`: a version's tensors are copied now, because they may change before the worker has read them.
    """

    def __init__(self, receive: Receive, *, copies: bool = False) -> None:
        self._receive = receive
        self._lock = threading.RLock()
        self._copies = copies
        self._inboxes: dict[str, Inbox] = {}

    def connect(self, worker: str) -> "InProcLink":
        if worker in self._inboxes:
            problem = "a worker named {worker} is already connected"
            raise LinkError(problem, worker=worker, hint="give each worker its own name")
        self._inboxes[worker] = Inbox()
        return InProcLink(worker, receive=self._receive_one, inbox=self._inboxes[worker], leave=self._disconnect)

    def send(self, worker: str, message: ToWorker) -> None:
        """Put a message into a worker's queue; a worker that has gone gets nothing."""
        inbox = self._inboxes.get(worker)
        if inbox is not None:
            if self._copies and isinstance(message, Version):
                message = replace(message, parameters=_copied(message.parameters))
            inbox.put(message)

    def _receive_one(self, worker: str, message: ToCoordinator) -> None:
        with self._lock:
            self._receive(worker, message)

    def _disconnect(self, worker: str) -> None:
        self._inboxes.pop(worker, None)


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
        inbox: Inbox,
        leave: Callable[[str], None],
    ) -> None:
        self._worker = worker
        self._receive = receive
        self._inbox = inbox
        self._leave = leave
        self._pieces: tuple[int, Tensors] = (0, {})

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            message = replace(message, tensors=self._joined(message.lease_id, message.tensors))
            self._pieces = (0, {})
        self._receive(self._worker, message)

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        self._pieces = (lease_id, self._joined(lease_id, piece))

    def _joined(self, lease_id: int, tensors: Tensors) -> Tensors:
        ahead = self._pieces[1] if self._pieces[0] == lease_id else {}
        return {**ahead, **tensors} if ahead and ahead.keys().isdisjoint(tensors) else tensors

    def next_event(self) -> ToWorker:
        return self._inbox.next_event()

    def interrupted(self) -> bool:
        return self._inbox.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, dict)
        return ref

    def close(self) -> None:
        self._leave(self._worker)
