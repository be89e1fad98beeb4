"""The in-process link: it passes tensors by reference, and the coordinator runs in the worker's thread."""

import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Lease, Stop, TensorRef, Tensors, ToCoordinator, Version


class Inbox:
    """A queue of events, filled by one thread and read by another. A LinkError ends the session and stays in it."""

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: list[Any] = []
        self.put = self._incoming.put

    def next_event(self, *, seconds: float | None = None) -> Any:
        """The next event that is not outdated: of several leases, and of several versions before a lease, only the
        newest counts. None if nothing arrives within `seconds`. Raises LinkError.
        """
        if not self._waiting:
            with suppress(queue.Empty):
                self._waiting.append(self._incoming.get(timeout=seconds))
        self._drain()
        while self._waiting and self._outdated(*self._waiting):
            del self._waiting[0]
        if self._waiting and isinstance(self._waiting[0], LinkError):
            raise self._waiting[0]
        return self._waiting.pop(0) if self._waiting else None

    def _outdated(self, event: object, *later: object) -> bool:
        """Whether a later event replaces this one. A lease is computed from the version before it, so a version after
        the last lease replaces neither."""
        leases = [index for index, other in enumerate(later) if isinstance(other, Lease)]
        if isinstance(event, Version):
            until = leases[-1] if leases else len(later)
            return any(isinstance(other, Version) for other in later[:until])
        return isinstance(event, Lease) and bool(leases)

    def interrupted(self) -> bool:
        self._drain()
        return any(isinstance(event, Lease | Stop | LinkError) for event in self._waiting)

    def final_stop(self) -> Stop | None:
        """The Stop among the unread events, if there is one."""
        self._drain()
        return next((event for event in self._waiting if isinstance(event, Stop)), None)

    def _drain(self) -> None:
        while not self._incoming.empty():
            self._waiting.append(self._incoming.get())


class InProcLink:
    """The link of a worker in the coordinator's thread: `call` runs the coordinator, which answers into `inbox`."""

    def __init__(self, receive: Callable[[ToCoordinator], None]) -> None:
        self.call = receive
        self.inbox = Inbox()
        self.next_event, self.interrupted = self.inbox.next_event, self.inbox.interrupted

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, dict)
        return ref
