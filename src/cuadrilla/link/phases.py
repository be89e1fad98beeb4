"""A link that knows what its worker does just now, and how fast tensors travel on it."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cuadrilla.link.base import Contribution, Link, TensorRef, Tensors, ToCoordinator, ToWorker


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Of the time since the last look. Bytes per second while something travelled; None where nothing did."""

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


class PhasedLink:
    """Wraps `link`. Whoever waits for the next event waits; between its calls a worker computes. `answered` is called
    when the first event has come.

    Used by the loop's thread and by the one that sends; `look` by any.
    """

    def __init__(
        self,
        link: Link,
        *,
        answered: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._answered = answered
        self._clock = clock
        self._lock = threading.Lock()
        self._times = _Times(began=clock())
        self._waiting_since = math.nan
        self._loop_phase, self._sending = "loading", 0

    def look(self) -> Spent:
        """What it does now, and what became of the time since the last look."""
        now = self._clock()
        with self._lock:
            times, self._times = self._times, _Times(began=now)
            if not math.isnan(self._waiting_since):
                times.waiting += now - max(self._waiting_since, times.began)
            phase = "sending" if self._sending and self._loop_phase == "waiting" else self._loop_phase
        return Spent(
            phase=phase,
            waiting_part=min(1.0, times.waiting / max(now - times.began, 1e-9)),
            sent_bytes_per_second=times.sent.rate,
            received_bytes_per_second=times.received.rate,
        )

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution) and message.tensors:
            with self._sends(message.tensors):
                self._link.call(message)
        else:
            self._link.call(message)

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        with self._sends(piece):
            self._link.upload(piece, lease_id=lease_id)

    def next_event(self) -> ToWorker:
        with self._lock:
            self._loop_phase, self._waiting_since = "waiting", self._clock()
        try:
            event = self._link.next_event()
        finally:
            with self._lock:
                self._times.waiting += self._clock() - max(self._waiting_since, self._times.began)
                self._loop_phase, self._waiting_since = "computing", math.nan
        if self._answered is not None:
            self._answered()
            self._answered = None
        return event

    def interrupted(self) -> bool:
        return self._link.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        self._loop_phase, began = "receiving", self._clock()
        found = self._link.download(ref)
        with self._lock:
            self._count(self._times.received, found, began)
            self._loop_phase = "computing"
        return found

    def close(self) -> None:
        self._link.close()

    @contextmanager
    def _sends(self, tensors: Tensors) -> Iterator[None]:
        began = self._clock()
        with self._lock:
            self._sending += 1
        try:
            yield
        finally:
            with self._lock:
                self._sending -= 1
                self._count(self._times.sent, tensors, began)

    def _count(self, travelled: _Travelled, tensors: Tensors, began: float) -> None:
        travelled.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        travelled.seconds += self._clock() - began
