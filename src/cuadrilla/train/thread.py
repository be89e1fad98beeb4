"""The coordinator's thread: whoever calls `serve` decides, merges and answers; everybody else enqueues calls.

The threads of links, as many as there are workers, put what they hear into an inbox and go on at once. So nothing that
a coordinator does has to be locked, and a worker that says something never waits for a merge.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from cuadrilla.link.base import ToCoordinator
from cuadrilla.train.coordinate import CoordinatorRuntime, Outcome

TICK_SECONDS = 0.1


class CoordinatorThread:
    """Around one run's coordination, which nobody else calls from now on, but for `open` beforehand and in `poll`."""

    def __init__(self, coordination: CoordinatorRuntime) -> None:
        self._coordination = coordination
        self.heard, self.reported = coordination.heard, coordination.reported
        # Not a SimpleQueue: its `get` with a timeout waits for ever after a signal's handler that took longer (3.11).
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._lock = threading.RLock()  # what is done at once may enqueue itself: a session that is ended
        self._over = False

    # -- from any thread; they raise nothing ---------------------------------------------------------------------------

    def deliver(self, worker: str, message: ToCoordinator) -> None:
        """A worker's message."""
        self._enqueue(partial(self._coordination.deliver, worker, message))

    def left(self, worker: str, reason: str) -> None:
        """A worker is gone."""
        self._enqueue(partial(self._coordination.left, worker, reason))

    def _enqueue(self, call: Callable[[], None]) -> None:
        """Once the run is over there is nobody to read it: who comes then is told so at once."""
        with self._lock:
            if not self._over:
                self._inbox.put(call)
                return
            call()

    # -- from the coordinator's thread ---------------------------------------------------------------------------------

    def serve(self, poll: Callable[[], None], *, every_seconds: float = TICK_SECONDS) -> Outcome:
        """Work until the run ends; `poll` now and then notes what else has happened. Raises what made the run fail."""
        coordination, due = self._coordination, 0.0
        try:
            while not coordination.is_over:
                with suppress(queue.Empty):
                    if (left := due - time.monotonic()) > 0:
                        self._inbox.get(timeout=left)()
                        continue
                for _ in range(self._inbox.qsize()):  # a Hello counts before the heartbeats that came after it
                    self._inbox.get()()
                coordination.tick()
                if not coordination.is_over:
                    poll()
                due = time.monotonic() + every_seconds
        finally:
            with self._lock:
                self._over = True
                while not self._inbox.empty():
                    self._inbox.get()()
        return coordination.result()
