"""A link with a worker of chosen speed behind it, and of chosen bandwidth and delay: practice for an unequal crew.

After each finished pass the worker sleeps, so that a speed of 0.5 takes twice the time; not for the time in which its
process was stopped. Tensors take as long as they would at the given bandwidth, each direction by itself; messages
arrive later by the delay. A contribution's time comes before that of the wrapped link, which has it no sooner than the
coordinator would. The wrapped link is unchanged otherwise, and so are the results.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from cuadrilla.errors import ConfigError
from cuadrilla.link.base import (
    Computed,
    Contribution,
    Lease,
    Link,
    Progress,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
)

PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
LONGEST_GROWTH = 4.0
"""A pass counts for at most this many times the one before: what took longer was not computing."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`speed` is relative to this machine, 1.0 leaves it as it is. `bits_per_second` 0: no limit."""

    speed: float = 1.0
    bits_per_second: float = 0.0
    delay_seconds: float = 0.0


def parse_shape(text: str, *, speed: float) -> Shape:
    """A shape from `100mbit`, `1gbit+0.5ms` or nothing. Raises ConfigError."""
    if not text:
        return Shape(speed=speed)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit(?:\+(\d+(?:\.\d+)?)ms)?", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            "{text!r} is not the bandwidth of a link, with or without a delay",
            text=text,
            hint="write it as 100mbit or 100mbit+20ms",
        )
    bits = float(match[1]) * PREFIXES[match[2]]
    return Shape(speed=speed, bits_per_second=bits, delay_seconds=float(match[3] or 0) / 1000)


class ShapedLink:
    """Wraps `link`."""

    def __init__(
        self,
        link: Link,
        *,
        shape: Shape,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert shape.speed > 0
        self._link = link
        self._shape = shape
        self._clock = clock
        self._sleep = sleep
        self._pass_began = clock()
        self._pass_seconds = math.inf

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Progress):
            self._pass_seconds = min(self._clock() - self._pass_began, LONGEST_GROWTH * self._pass_seconds)
            if self._shape.speed < 1:
                self._sleep((1 / self._shape.speed - 1) * self._pass_seconds)
        elif not isinstance(message, Computed):  # the next lease is computed at once
            seconds = self._seconds(message.tensors) if isinstance(message, Contribution) else 0.0
            self._pause(seconds + self._shape.delay_seconds)
        self._link.call(message)
        if not isinstance(message, Contribution):  # which may travel while the next pass is computed
            self._pass_began = self._clock()

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        self._pause(self._seconds(piece))
        self._link.upload(piece, lease_id=lease_id)

    def next_event(self) -> ToWorker:
        began = self._clock()
        event = self._link.next_event()
        if self._clock() - began > 1e-3:  # it was not waiting already: it has just come over the link
            self._pause(self._shape.delay_seconds)
        if isinstance(event, Lease):
            self._pass_began = self._clock()
        return event

    def interrupted(self) -> bool:
        return self._link.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        began = self._clock()
        tensors = self._link.download(ref)
        self._pause(began + self._seconds(tensors) - self._clock())
        return tensors

    def close(self) -> None:
        self._link.close()

    def _seconds(self, tensors: Tensors) -> float:
        """How long they take."""
        shape = self._shape
        num_bits = 8 * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return shape.delay_seconds + (num_bits / shape.bits_per_second if shape.bits_per_second else 0.0)

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)
