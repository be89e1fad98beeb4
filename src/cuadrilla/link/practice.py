"""The one layer around a worker's link: practice for an unequal crew, and statistics of the worker's time.

Practice: after each finished pass the worker sleeps, so that a speed of 0.5 takes twice the time; not for the time in
which its process was stopped. Tensors take as long as they would at the given bandwidth, and messages arrive later by
the delay. A contribution's time comes before that of the wrapped link, which has it no sooner than the coordinator
would. The results are the same.

Statistics: what the worker does at this moment and how fast tensors travel, for the reports of its machine; and a line
for its owner now and then.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cuadrilla.errors import ConfigError
from cuadrilla.link.base import Contribution, Lease, Link, Progress, TensorRef, Tensors, ToCoordinator, ToWorker
from cuadrilla.messages import Message

PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
MAX_GROWTH = 4.0
"""A pass counts for at most this many times the one before: what took longer was not computing."""
LINE_SECONDS = 10.0


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


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Of the time since the last poll. Bytes per second while something travelled; None where nothing did."""

    phase: str
    waiting_part: float
    sent_bytes_per_second: float | None
    received_bytes_per_second: float | None


@dataclass
class _Travelled:
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.num_bytes / self.seconds if self.num_bytes and self.seconds > 0 else None


@dataclass(kw_only=True)
class _Times:
    began: float
    waiting: float = 0.0
    sent: _Travelled = field(default_factory=_Travelled)
    received: _Travelled = field(default_factory=_Travelled)


class OwnerLines:
    """Step, share of the work and speed: the first answer makes a line for `report`, then at most one every
    LINE_SECONDS.

    The share is that of the units of all steps since the line before, the speed that of the time with work.
    """

    def __init__(self, report: Callable[[str], None], *, units_per_round: int, counted: str = "tokens") -> None:
        self._report = report
        self._units_per_round = units_per_round
        self._counted = counted
        self._told_at, self._told_step = -math.inf, -1
        self._lease: tuple[Lease, float] | None = None  # not answered yet, and since when
        self._seconds = 0.0
        self._units = self._tokens = 0

    def begin(self, lease: Lease, *, now: float) -> None:
        self._lease = lease, now
        if self._told_step < 0:
            self._told_step = lease.version

    def answer(self, answer: Contribution, *, now: float) -> None:
        if self._lease is None or self._lease[0].lease_id != answer.lease_id:
            return
        (lease, began), self._lease = self._lease, None
        self._units += len(lease.units)
        self._tokens += answer.tokens
        self._seconds += now - began
        if now - self._told_at < LINE_SECONDS:
            return
        step = lease.version + 1
        rounds = max(1, step - self._told_step)
        share = min(1.0, self._units / (rounds * self._units_per_round))
        speed = self._tokens / self._seconds if self._seconds > 0 else 0.0
        self._report(
            Message(
                "step {step}  share {percent:.0f} %  {speed:,.0f} {counted}/s",
                step=step,
                percent=100 * share,
                speed=speed,
                counted=self._counted,
            )
        )
        self._told_at, self._told_step = now, step
        self._units, self._tokens, self._seconds = 0, 0, 0.0


class PracticeLink:
    """Wraps `link`. `lines`: for the worker's owner; `answered`: called when the first event has come.

    Used by the loop's thread; `poll` by any.
    """

    def __init__(
        self,
        link: Link,
        *,
        shape: Shape | None = None,
        lines: OwnerLines | None = None,
        answered: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._link = link
        self._shape = shape or Shape()
        assert self._shape.speed > 0
        self._lines = lines
        self._answered = answered
        self._clock = clock
        self._sleep = sleep
        self._pass_began = clock()
        self._pass_seconds = math.inf
        self._lock = threading.Lock()
        self._times = _Times(began=clock())
        self._waiting_since = math.nan
        self._phase = "loading"

    def poll(self) -> Spent:
        """What it does now, and what became of the time since the last poll."""
        now = self._clock()
        with self._lock:
            times, self._times = self._times, _Times(began=now)
            if not math.isnan(self._waiting_since):
                times.waiting += now - max(self._waiting_since, times.began)
            phase = self._phase
        return Spent(
            phase=phase,
            waiting_part=min(1.0, times.waiting / max(now - times.began, 1e-9)),
            sent_bytes_per_second=times.sent.rate,
            received_bytes_per_second=times.received.rate,
        )

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            self._send(message)
        else:
            self._pause(self._rest() if isinstance(message, Progress) else self._shape.delay_seconds)
            self._link.call(message)
        self._pass_began = self._clock()

    def next_event(self) -> ToWorker:
        began = self._clock()
        with self._lock:
            self._phase, self._waiting_since = "waiting", began
        try:
            event = self._link.next_event()
            if self._clock() - began > 1e-3:  # it was not waiting already: it has just come over the link
                self._pause(self._shape.delay_seconds)
        finally:
            now = self._clock()
            with self._lock:
                self._times.waiting += now - max(self._waiting_since, self._times.began)
                self._phase, self._waiting_since = "computing", math.nan
        if self._answered is not None:
            self._answered()
            self._answered = None
        if isinstance(event, Lease):
            self._pass_began = now
            if self._lines is not None:
                self._lines.begin(event, now=now)
        return event

    def interrupted(self) -> bool:
        return self._link.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        began = self._clock()
        with self._travelling("receiving") as travelled:
            found = self._link.download(ref)
            travelled.num_bytes = num_bytes_of(found)
            self._pause(began + self._seconds(travelled.num_bytes) - self._clock())
        return found

    def close(self) -> None:
        self._link.close()

    def _send(self, answer: Contribution) -> None:
        with self._travelling("sending") as travelled:
            travelled.num_bytes = num_bytes_of(answer.tensors)
            self._pause(self._seconds(travelled.num_bytes) + self._shape.delay_seconds)
            self._link.call(answer)
        if self._lines is not None:
            self._lines.answer(answer, now=self._clock())

    @contextmanager
    def _travelling(self, phase: str) -> Iterator[_Travelled]:
        """The bytes that the block notes travel as long as it takes."""
        travelled, began = _Travelled(), self._clock()
        with self._lock:
            self._phase = phase
        try:
            yield travelled
        finally:
            seconds = self._clock() - began if travelled.num_bytes else 0.0
            with self._lock:
                total = self._times.sent if phase == "sending" else self._times.received
                total.num_bytes += travelled.num_bytes
                total.seconds += seconds
                self._phase = "computing"

    def _rest(self) -> float:
        """Seconds to sleep after a pass."""
        self._pass_seconds = min(self._clock() - self._pass_began, MAX_GROWTH * self._pass_seconds)
        return (1 / self._shape.speed - 1) * self._pass_seconds

    def _seconds(self, num_bytes: int) -> float:
        """How long so many bytes take."""
        shape = self._shape
        return shape.delay_seconds + (8 * num_bytes / shape.bits_per_second if shape.bits_per_second else 0.0)

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)


def num_bytes_of(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
