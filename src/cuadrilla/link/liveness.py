"""Whether a connection on which nothing is answered is dead, or the coordinator has no time.

Who was without network for some seconds, was suspended, has another address, or is behind a router that has forgotten
its translations sends into a connection that is never answered again, or only when TCP tries again, with pauses that
double. The coordinator misses such a worker after seconds; it should be back as soon. A second connection tells the two
cases apart: a coordinator that has no time answers on neither.
"""

import threading
import time
from collections.abc import Callable

ASK_EVERY_SECONDS = 2.0
ANSWER_SECONDS = 2.0
SILENT_SECONDS = 6.0
"""By then the coordinator has given the worker's work to others, unless its run waits longer than usual."""


class Liveness:
    """Asks from a thread of its own, until `close` or until it has called `dead`, once.

    `asks` and `asks_anew` say whether the coordinator answers within the given seconds, on the connection and on a new
    one. While `busy`, nothing is asked: an answer may wait behind a transfer on a slow line.
    """

    def __init__(
        self,
        *,
        asks: Callable[[float], bool],
        asks_anew: Callable[[float], bool],
        busy: Callable[[], bool],
        dead: Callable[[], None],
    ) -> None:
        self._asks, self._asks_anew, self._busy, self._dead = asks, asks_anew, busy, dead
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="asks-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        answered = time.monotonic()
        while not self._over.wait(ASK_EVERY_SECONDS):
            if self._busy() or self._asks(ANSWER_SECONDS):
                answered = time.monotonic()
            elif time.monotonic() - answered >= SILENT_SECONDS and self._is_dead():
                self._dead()
                return

    def _is_dead(self) -> bool:
        there = self._asks_anew(ANSWER_SECONDS)
        return there and not self._busy() and not self._over.is_set() and not self._asks(ANSWER_SECONDS)
