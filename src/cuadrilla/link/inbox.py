"""What has come from the coordinator and was not read yet: every link has one."""

import queue

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Lease, Stop, ToWorker, Version


class Inbox:
    """Filled by one thread, read by another. A LinkError in it is the end of the session, and stays there."""

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[ToWorker | LinkError] = queue.SimpleQueue()
        self._waiting: list[ToWorker | LinkError] = []

    def put(self, event: ToWorker | LinkError) -> None:
        self._incoming.put(event)

    def next_event(self) -> ToWorker:
        """The next message that still counts: of leases the newest, and of the versions before it the newest."""
        if not self._waiting:
            self._waiting.append(self._incoming.get())
        self._drain()
        event = self._waiting.pop(0)
        while self._outdated(event):
            event = self._waiting.pop(0)
        if isinstance(event, LinkError):
            self._waiting.insert(0, event)
            raise event
        return event

    def _outdated(self, event: ToWorker | LinkError) -> bool:
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
