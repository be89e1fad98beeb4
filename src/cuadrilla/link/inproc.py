"""The in-process link: it passes tensors by reference, and the coordinator runs in the worker's thread."""

import threading
from collections.abc import Callable
from typing import Any

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Lease, Stop, TensorRef, Tensors, ToCoordinator, Version


class Inbox:
    """A worker's unread events, put in by other threads. The last one of a session is a Stop or a LinkError."""

    def __init__(self) -> None:
        self._unread: list[Any] = []
        self._changed = threading.Condition()

    def put(self, event: object) -> None:
        with self._changed:
            self._unread = [*still_valid(self._unread, event), event]
            self._changed.notify()

    def next_event(self, *, seconds: float | None = None) -> Any:
        """The next event; None if nothing arrives within `seconds`. Raises LinkError, at each call after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread, seconds)
            if self._unread and isinstance(self._unread[0], LinkError):
                raise self._unread[0]
            return self._unread.pop(0) if self._unread else None

    def interrupted(self) -> bool:
        return any(isinstance(event, Lease | Stop | LinkError) for event in self._unread)

    def final_stop(self) -> Stop | None:
        """The Stop among the unread events, if there is one."""
        return next((event for event in self._unread if isinstance(event, Stop)), None)


def still_valid(unread: list[Any], new: object) -> list[Any]:
    """The unread events that a `new` one does not replace. A lease is computed from the version before it."""
    ends = [event for event in unread if isinstance(event, Stop | LinkError)]
    match new:
        case Stop() | LinkError():
            return ends
        case Lease():
            return ends + [event for event in unread if isinstance(event, Version)][-1:]
        case Version() if unread and isinstance(unread[-1], Version):
            return unread[:-1]
    return unread


class InProcLink:
    """The link of a worker in the coordinator's thread: `call` runs the coordinator, which answers into `inbox`."""

    def __init__(self, receive: Callable[[ToCoordinator], None]) -> None:
        self.call = receive
        self.inbox = Inbox()
        self.next_event, self.interrupted = self.inbox.next_event, self.inbox.interrupted

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, dict)
        return ref
