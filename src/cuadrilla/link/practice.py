"""The one layer around a worker's link: it simulates slow machines and links (practice), and measures the worker.

Practice: after each pass the worker sleeps, so that a speed of 0.5 takes twice the time. Time in which its process was
stopped is not doubled. Tensors take as long as the given bandwidth needs, and messages are delayed. The layer waits for
a contribution's transfer time before it passes the contribution on, so it arrives no sooner than over a real link. The
results of the training are the same.

Statistics: the worker's present phase and the speed of transfers, for its machine's reports; and now and then a line
for its owner.
"""

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cuadrilla.config import LINK_SHAPE
from cuadrilla.link.base import (
    Contribution,
    Lease,
    Link,
    NodeReport,
    Progress,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
)
from cuadrilla.messages import Message

PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
MAX_GROWTH = 4.0
"""A pass counts as at most this many times as long as the one before: the rest of its time was not computing."""
LINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`speed`: relative to this machine's; 1.0 does not slow down. `bits_per_second`: 0 means no limit."""

    speed: float = 1.0
    bits_per_second: float = 0.0
    delay_seconds: float = 0.0


def parse_shape(text: str, *, speed: float = 1.0) -> Shape:
    """A shape from `100mbit`, `1gbit+0.5ms` or "". The text was checked before (`config.LINK_SHAPE`)."""
    match = re.fullmatch(LINK_SHAPE, text)
    if match is None or not text:
        return Shape(speed=speed)
    bits = float(match["rate"]) * PREFIXES[match["unit"]]
    return Shape(speed=speed, bits_per_second=bits, delay_seconds=float(match["delay"] or 0) / 1000)


class PracticeLink:
    """Wraps `link`. `tell` gets a line for the worker's owner with step, share and speed of the newest lease, at most
    every LINE_SECONDS.

    Used by the training loop's thread; any thread may call `poll`.
    """

    def __init__(
        self,
        link: Link,
        *,
        shape: Shape | None = None,
        tell: Callable[[str], None] | None = None,
        units_per_step: int = 1,
        counted: str = "tokens",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._link, self.interrupted = link, link.interrupted
        self._shape = shape or Shape()
        assert self._shape.speed > 0
        self._tell, self._units_per_step, self._counted = tell, units_per_step, counted
        self._told_at = -math.inf
        self._clock = clock
        self._sleep = sleep
        self._pass_began = self._polled_at = self._phase_began = clock()
        self._pass_seconds = math.inf
        self._lease: tuple[Lease, float] | None = None
        """The newest lease and when it arrived."""
        self._lock = threading.Lock()
        self._phase = "loading"
        self._waited = 0.0
        """Seconds of waiting since the last poll."""
        self._rates: dict[str, float] = {}
        """By phase: bytes per second of the newest transfer since the last poll."""

    def poll(self) -> NodeReport:
        """A report with the present phase, and the waiting and the transfers since the last poll."""
        now = self._clock()
        with self._lock:
            if self._phase == "waiting":
                self._waited += now - self._phase_began
                self._phase_began = now
            waited, self._waited, rates, self._rates = self._waited, 0.0, self._rates, {}
            began, self._polled_at = self._polled_at, now
        return NodeReport(
            phase=self._phase,
            waiting_part=min(1.0, waited / max(now - began, 1e-9)),
            sent_bytes_per_second=rates.get("sending"),
            received_bytes_per_second=rates.get("receiving"),
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
        self._begin_phase("waiting")
        try:
            event = self._link.next_event()
            if self._clock() - began > 1e-3:  # the event has just arrived: it was not in the inbox before
                self._pause(self._shape.delay_seconds)
        finally:
            self._begin_phase("computing")
        if isinstance(event, Lease):
            self._pass_began = self._clock()
            self._lease = event, self._pass_began
        return event

    def download(self, ref: TensorRef) -> Tensors:
        began, num_bytes = self._clock(), 0
        self._begin_phase("receiving")
        try:
            found = self._link.download(ref)
            num_bytes = sum(tensor.nbytes for tensor in found.values())
            self._pause(began + self._travel_seconds(num_bytes) - self._clock())
        finally:
            self._begin_phase("computing", bytes_before=num_bytes)
        return found

    def _send(self, answer: Contribution) -> None:
        num_bytes = sum(tensor.nbytes for tensor in answer.tensors.values())
        self._begin_phase("sending")
        try:
            travel_seconds = self._travel_seconds(num_bytes) + self._shape.delay_seconds
            self._pause(travel_seconds)
            self._link.call(replace(answer, transfer_seconds=answer.transfer_seconds + travel_seconds))
        finally:
            self._begin_phase("computing", bytes_before=num_bytes)
        self._tell_owner(answer.tokens)

    def _tell_owner(self, tokens: int) -> None:
        """Say how the newest lease, which had this many tokens, went."""
        now = self._clock()
        if self._tell is None or self._lease is None or now - self._told_at < LINE_SECONDS:
            return
        (lease, began), self._told_at = self._lease, now
        self._tell(
            Message(
                "step {step}  share {percent:.0f} %  {speed:,.0f} {counted}/s",
                step=lease.version + lease.steps,
                percent=100 * len(lease.units) / (lease.steps * self._units_per_step),
                speed=tokens / max(now - began, 1e-9),
                counted=self._counted,
            )
        )

    def _begin_phase(self, phase: str, *, bytes_before: int = 0) -> None:
        """Begin a phase. `bytes_before`: transferred in the phase before."""
        now = self._clock()
        with self._lock:
            if bytes_before:
                self._rates[self._phase] = bytes_before / max(now - self._phase_began, 1e-9)
            elif self._phase == "waiting":
                self._waited += now - self._phase_began
            self._phase, self._phase_began = phase, now

    def _rest(self) -> float:
        """Seconds to sleep after a pass."""
        self._pass_seconds = min(self._clock() - self._pass_began, MAX_GROWTH * self._pass_seconds)
        return (1 / self._shape.speed - 1) * self._pass_seconds

    def _travel_seconds(self, num_bytes: int) -> float:
        shape = self._shape
        return shape.delay_seconds + (8 * num_bytes / shape.bits_per_second if shape.bits_per_second else 0.0)

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)
