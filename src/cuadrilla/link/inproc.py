"""The in-process link: a queue per worker, tensors by reference, the coordinator in the caller's own thread.

`InProcServer` is the coordinator's side. A worker's `call` runs the coordinator, one call at a time, and returns when
the resulting messages lie in the workers' queues, so one worker alone needs no second thread and no copy.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Lease, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version

Receive = Callable[[str, ToCoordinator], None]


class Inbox:
    """Filled by one thread, read by another. A LinkError in it is the end of the session, and stays there."""

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: list[Any] = []
        self.put = self._incoming.put

    def next_event(self, *, seconds: float | None = None) -> Any:
        """The next message that still counts: of leases the newest, and of the versions before it the newest. None if
        nothing comes in these seconds. Raises LinkError.
        """
        if not self._waiting:
            with suppress(queue.Empty):
                self._waiting.append(self._incoming.get(timeout=seconds))
        self._drain()
        if not self._waiting:
            return None
        event = self._waiting.pop(0)
        while self._outdated(event):
            event = self._waiting.pop(0)
        if isinstance(event, LinkError):
            self._waiting.insert(0, event)
            raise event
        return event

    def _outdated(self, event: object) -> bool:
        """A lease is computed with the version before it: one that comes after it makes neither of them outdated."""
        leases = [index for index, later in enumerate(self._waiting) if isinstance(later, Lease)]
        if isinstance(event, Version):
            until = leases[-1] if leases else len(self._waiting)
            return any(isinstance(later, Version) for later in self._waiting[:until])
        return isinstance(event, Lease) and bool(leases)

    def interrupted(self) -> bool:
        self._drain()
        return any(isinstance(event, Lease | Stop | LinkError) for event in self._waiting)

    def farewell(self) -> Stop | None:
        """The Stop among what was not read, if there is one."""
        self._drain()
        return next((event for event in self._waiting if isinstance(event, Stop)), None)

    def _drain(self) -> None:
        while not self._incoming.empty():
            self._waiting.append(self._incoming.get())


class InProcServer:
    """Connects workers of this process to a coordinator: `receive(worker, message)` is called in their threads."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._lock = threading.RLock()
        self._inboxes: dict[str, Inbox] = {}

    def connect(self, worker: str) -> "InProcLink":
        if worker in self._inboxes:
            problem = "a worker named {worker} is already connected"
            raise LinkError(problem, worker=worker, hint="give each worker its own name")
        self._inboxes[worker] = Inbox()
        return InProcLink(self, worker, self._inboxes[worker])

    def send(self, worker: str, message: ToWorker) -> None:
        """Put a message into a worker's queue; a worker that has gone gets nothing."""
        inbox = self._inboxes.get(worker)
        if inbox is not None:
            inbox.put(message)

    def receive(self, worker: str, message: ToCoordinator) -> None:
        with self._lock:
            self._receive(worker, message)

    def disconnect(self, worker: str) -> None:
        self._inboxes.pop(worker, None)


class InProcLink:
    """A worker's end."""

    def __init__(self, server: InProcServer, worker: str, inbox: Inbox) -> None:
        self._server, self._worker, self._inbox = server, worker, inbox

    def call(self, message: ToCoordinator) -> None:
        self._server.receive(self._worker, message)

    def next_event(self) -> ToWorker:
        event: ToWorker = self._inbox.next_event()
        return event

    def interrupted(self) -> bool:
        return self._inbox.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, dict)
        return ref

    def close(self) -> None:
        self._server.disconnect(self._worker)
