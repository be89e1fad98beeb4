"""A link with a worker of chosen speed behind it: practice for a crew of unequal machines.

After each finished pass the worker sleeps, so that a speed of 0.5 takes twice the time. The wrapped link is
unchanged otherwise, and so are the results.
"""

import time
from collections.abc import Callable

from cuadrilla.link.base import Lease, Link, Progress, TensorRef, Tensors, ToCoordinator, ToWorker


class ShapedLink:
    """Wraps `link`; `speed` is relative to this machine, 1.0 leaves it as it is."""

    def __init__(
        self,
        link: Link,
        *,
        speed: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert speed > 0
        self._link = link
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._pass_began = clock()

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Progress) and self._speed < 1:
            self._sleep((1 / self._speed - 1) * (self._clock() - self._pass_began))
        self._link.call(message)
        self._pass_began = self._clock()

    def next_event(self) -> ToWorker:
        event = self._link.next_event()
        if isinstance(event, Lease):
            self._pass_began = self._clock()
        return event

    def stopped(self) -> bool:
        return self._link.stopped()

    def upload(self, tensors: Tensors) -> TensorRef:
        return self._link.upload(tensors)

    def download(self, ref: TensorRef) -> Tensors:
        return self._link.download(ref)

    def close(self) -> None:
        self._link.close()
