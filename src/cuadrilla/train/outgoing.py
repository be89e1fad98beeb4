"""A worker's answers on their way: sent before the loop goes on, or, for a strategy that streams, while it does.

Then a thread sends, one thing after another: at most one whole answer travels while the next one is computed, and who
computes faster than its line carries waits here. What went wrong there is raised at the next thing to send; a link that
breaks says so to the loop by itself.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType

from cuadrilla.link.base import Computed, Contribution, Lease, Link
from cuadrilla.sync.strategy import Streaming, WorkerHalf

LEAVE_SECONDS = 5.0
"""A run that has ended wants no answer any more; closing the link ends what still travels."""


class Outgoing:
    """The answers of one session. Used by the loop's thread; leaving it waits a moment for what still travels."""

    def __init__(self, link: Link, sync: WorkerHalf) -> None:
        self._link = link
        self._streaming = sync if isinstance(sync, Streaming) else None
        self._sent: Future[None] | None = None

    def stepped(self, lease: Lease) -> None:
        """After each step of a lease: send what is ready of its answer. Raises LinkError."""
        if self._streaming is not None and (piece := self._streaming.piece(lease)):
            self._send(partial(self._link.upload, piece, lease_id=lease.lease_id))

    def answer(self, contribution: Contribution) -> None:
        """Raises LinkError."""
        if self._streaming is None:
            self._link.call(contribution)
        else:
            self._link.call(Computed(lease_id=contribution.lease_id))
            self._send(partial(self._link.call, contribution))

    def __enter__(self) -> "Outgoing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sent is not None:
            wait([self._sent], timeout=LEAVE_SECONDS)

    def _send(self, send: Callable[[], None]) -> None:
        if self._sent is not None:
            self._sent.result()
        sender = ThreadPoolExecutor(1, thread_name_prefix="sends-answer")
        self._sent = sender.submit(send)
        sender.shutdown(wait=False)  # its thread ends when this is sent
