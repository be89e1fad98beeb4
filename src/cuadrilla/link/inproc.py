"""The in-process link: tensors by reference, the coordinator in the worker's own thread."""

import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Lease, Stop, TensorRef, Tensors, ToCoordinator, Version


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
        while self._waiting and self._outdated(*self._waiting):
            del self._waiting[0]
        if self._waiting and isinstance(self._waiting[0], LinkError):
            raise self._waiting[0]
        return self._waiting.pop(0) if self._waiting else None

    def _outdated(self, event: object, *later: object) -> bool:
        """A lease is computed with the version before it: one that comes after it makes neither of them outdated."""
        leases = [index for index, other in enumerate(later) if isinstance(other, Lease)]
        if isinstance(event, Version):
            until = leases[-1] if leases else len(later)
            return any(isinstance(other, Version) for other in later[:until])
        return isinstance(event, Lease) and bool(leases)

    def interrupted(self) -> bool:
        self._drain()
        return any(isinstance(event, Lease | Stop | LinkError) for event in self._waiting)

    def final_stop(self) -> Stop | None:
        """The Stop among what was not read, if there is one."""
        self._drain()
        return next((event for event in self._waiting if isinstance(event, Stop)), None)

    def _drain(self) -> None:
        while not self._incoming.empty():
            self._waiting.append(self._incoming.get())


class InProcLink:
    """The end of a worker in the coordinator's thread: `call` runs the coordinator, which answers into `inbox`."""

    def __init__(self, receive: Callable[[ToCoordinator], None]) -> None:
        self.call = receive
        self.inbox = Inbox()
        self.next_event, self.interrupted = self.inbox.next_event, self.inbox.interrupted

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, dict)
        return ref

    def close(self) -> None:
        """Nothing is open."""
