"""One thread that continues everybody's sequences together; callers wait for theirs in the event loop.

Invariants
* A row takes part from the next step on if a slot is free, else it waits its turn; the queue is bounded. It leaves at
  the step at which it ends or its caller has gone.
* Whatever a step brings is handed over in one turn of the event loop, in the order of the steps.
* An error in a step ends the rows at hand with the reason `error`, and the thread goes on.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cuadrilla.model.rows import Reason, Row, Rows
from cuadrilla.serve.edge import Refusal

log = logging.getLogger(__name__)

Progress = tuple[Row, int | None, Reason | None]
"""What came of a row: a token, and why it has ended if it has."""


@dataclass(eq=False)
class Call:
    """Rows that somebody waits for: `steps` has what comes of each, until all have ended."""

    arrived: float = field(default_factory=time.perf_counter)
    steps: "asyncio.Queue[Progress]" = field(default_factory=asyncio.Queue)


class Batcher:
    """Continues rows of one model. Make it in the event loop that its calls come from; `close` it there."""

    def __init__(self, rows: Rows, *, max_waiting: int) -> None:
        self._rows, self.slots, self._max_waiting = rows, rows.free, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._calls: dict[Row, Call] = {}
        """The calls of all rows that have not ended."""
        self._left: set[Row] = set()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="batcher")
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy_slots(self) -> int:
        return self.slots - self._rows.free

    def submit(self, rows: Sequence[Row]) -> Call:
        """All of them, or none. Raises Refusal when so many more cannot wait."""
        call = Call()
        for row in rows:
            if row.reason is not None:  # nothing is to be generated
                call.steps.put_nowait((row, None, row.reason))
        waiting = [row for row in rows if row.reason is None]
        with self._changed:
            self._check_room(len(waiting))
            self._calls |= dict.fromkeys(waiting, call)
            self._waiting.extend(waiting)
            self._changed.notify()
        return call

    def leave(self, *rows: Row) -> None:
        """Their caller has enough; a slot is free after the step at hand."""
        with self._changed:
            self._left.update(row for row in rows if row in self._calls)

    def _check_room(self, number: int) -> None:
        most = self.slots + self._max_waiting
        if number > most:
            raise Refusal(400, f"that is more than the {most} texts that this service takes at once", param="n")
        if self._closing:
            raise Refusal(503, "the service is ending", code="draining", Retry_After="1")
        if number and len(self._calls) + number > most:
            raise Refusal(429, "too many calls wait already", code="overloaded", Retry_After="1")

    def end(self) -> None:
        """Rows at hand end with the reason `error`, at once; nothing more is taken."""
        with self._changed:
            ended = [] if self._closing else list(self._calls.items())
            self._closing = True
            self._changed.notify()
        for row, call in ended:
            call.steps.put_nowait((row, None, "error"))

    async def close(self) -> None:
        """Like `end`; the thread ends after its step."""
        self.end()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        try:
            while self._take_in():
                self._step()
        finally:  # also when it is our own mistake: nobody must wait for a thread that is gone
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.end)

    def _step(self) -> None:
        try:
            chosen = self._rows.step()
        except RuntimeError as error:  # torch's: out of memory
            log.error("a step of generation has failed: %s", error)
            with self._changed:
                ended = [row for row in self._calls if row not in self._waiting]
            for row in ended:
                self._rows.leave(row)
                row.reason = "error"
            chosen = [(row, None) for row in ended]
        with self._changed:
            told = [(self._calls[row], (row, token, row.reason)) for row, token in chosen]
            for row, _ in chosen:
                if row.reason is not None:
                    del self._calls[row]
                    self._left.discard(row)
        self._tell(told)

    def _take_in(self) -> bool:
        """Who has gone leaves, who waits joins; waits for something to do. False when the thread is to end."""
        with self._changed:
            while not self._closing:
                for row in self._left:
                    if row in self._waiting:
                        self._waiting.remove(row)
                    else:
                        self._rows.leave(row)
                    del self._calls[row]
                self._left.clear()
                while self._waiting and self._rows.free:
                    self._rows.join(self._waiting.popleft())
                if self._calls:
                    return True
                self._changed.wait()
            return False

    def _tell(self, told: Sequence[tuple[Call, Progress]]) -> None:
        def hand_over() -> None:
            for call, step in told:
                call.steps.put_nowait(step)

        if told and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(hand_over)
