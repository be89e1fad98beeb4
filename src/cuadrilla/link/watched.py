"""A link that tells its worker's owner how it is going: the step, its share of the work and its speed, now and then."""

import math
import time
from collections.abc import Callable

from cuadrilla.link.base import Contribution, Lease, Link, TensorRef, Tensors, ToCoordinator, ToWorker
from cuadrilla.messages import Message

LINE_SECONDS = 10.0


class WatchedLink:
    """Wraps `link`. The first answer makes a line for `report`, and then at most one every LINE_SECONDS.

    The share is that of the units of all steps since the line before, the speed that of the time with work.
    """

    def __init__(
        self,
        link: Link,
        *,
        report: Callable[[str], None],
        units_per_round: int,
        counted: str = "tokens",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._report = report
        self._units_per_round = units_per_round
        self._counted = counted
        self._clock = clock
        self._told_at, self._told_step = -math.inf, -1
        self._leases: dict[int, tuple[Lease, float]] = {}  # not answered yet, and since when
        self._seconds = 0.0
        self._units = self._tokens = 0

    def call(self, message: ToCoordinator) -> None:
        self._link.call(message)
        if isinstance(message, Contribution) and message.lease_id in self._leases:
            self._count(*self._leases[message.lease_id], message)
            for older in [number for number in self._leases if number <= message.lease_id]:
                del self._leases[older]

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        self._link.upload(piece, lease_id=lease_id)

    def next_event(self) -> ToWorker:
        event = self._link.next_event()
        if isinstance(event, Lease):
            self._leases[event.lease_id] = event, self._clock()
            if self._told_step < 0:
                self._told_step = event.version
        return event

    def interrupted(self) -> bool:
        return self._link.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        return self._link.download(ref)

    def close(self) -> None:
        self._link.close()

    def _count(self, lease: Lease, began: float, answer: Contribution) -> None:
        now = self._clock()
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
