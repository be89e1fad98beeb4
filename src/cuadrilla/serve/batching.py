"""One thread continues the sequences of all callers together. Callers wait for theirs in the event loop.

Invariants
* A row takes part from the next step on if a slot is free. Otherwise it waits in a bounded queue. It leaves after the
  step in which it ends or its caller gives it up.
* All results of a step are handed over in one turn of the event loop, in the order of the steps.
* An error in a step ends the rows that have a slot with the reason `error`. The thread goes on.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cuadrilla.model.rows import Reason, Row, Rows
from cuadrilla.serve.edge import Refusal

log = logging.getLogger(__name__)

Steps = asyncio.Queue[tuple[Row, int | None, Reason | None]]
"""What the steps gave the rows of one call: a row, its token or None, and the reason if it has ended."""


class Batcher:
    """Continues the rows of one model while it is `running`."""

    def __init__(self, rows: Rows, *, max_waiting: int) -> None:
        self._rows, self.slots, self._max_waiting = rows, rows.free, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._calls: dict[Row, Steps] = {}
        """For each row that has not ended, the queue of its call."""
        self._left: set[Row] = set()
        self.is_closing = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A block in which it works, once, for callers in this event loop. At its end all rows end, as by `end`."""
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._work, name="batcher")
        thread.start()
        try:
            yield
        finally:
            self.end()
            await asyncio.to_thread(thread.join)  # it ends after its current step

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy_slots(self) -> int:
        return self.slots - self._rows.free

    def submit(self, rows: Sequence[Row]) -> Steps:
        """Queue all of the rows, or none. Returns their progress, as it comes. Raises Refusal if there is no room."""
        steps = Steps()
        for row in rows:
            if row.reason is not None:  # nothing is to be generated
                steps.put_nowait((row, None, row.reason))
        waiting = [row for row in rows if row.reason is None]
        with self._changed:
            self._check_room(len(waiting))
            self._calls |= dict.fromkeys(waiting, steps)
            self._waiting.extend(waiting)
            self._changed.notify()
        return steps

    def leave(self, *rows: Row) -> None:
        """Give up rows that their caller no longer needs. Their slots are free after the current step."""
        with self._changed:
            self._left.update(row for row in rows if row in self._calls)

    def _check_room(self, number: int) -> None:
        most = self.slots + self._max_waiting
        if number > most:
            raise Refusal(400, f"that is more than the {most} texts that this service takes at once", param="n")
        if self.is_closing:
            raise Refusal(503, "the service is shutting down", code="draining", Retry_After="1")
        if number and len(self._calls) + number > most:
            raise Refusal(429, "too many requests are waiting; try again later", code="overloaded", Retry_After="1")

    def end(self) -> None:
        """End all rows at once, with the reason `error`, and refuse new ones."""
        with self._changed:
            ended = [] if self.is_closing else list(self._calls.items())
            self.is_closing = True
            self._changed.notify()
        for row, steps in ended:
            steps.put_nowait((row, None, "error"))

    def _work(self) -> None:
        try:
            while self._take_in():
                self._step()
        finally:  # even after a bug of ours: no caller must wait for a thread that is gone
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.end)

    def _step(self) -> None:
        try:
            chosen = self._rows.step()
        except RuntimeError as error:  # torch's, for example when memory runs out
            log.error("a step of generation has failed: %s", error)
            with self._changed:
                ended = [row for row in self._calls if row not in self._waiting]
            for row in ended:
                self._rows.leave(row)
                row.reason = "error"
            chosen = [(row, None) for row in ended]
        with self._changed:
            progress = [(self._calls[row], (row, token, row.reason)) for row, token in chosen]
            for row, _ in chosen:
                if row.reason is not None:
                    del self._calls[row]
                    self._left.discard(row)

        def hand_over() -> None:
            for steps, step in progress:
                steps.put_nowait(step)

        if progress and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(hand_over)

    def _take_in(self) -> bool:
        """Remove rows that were given up, add waiting ones, and wait for work. False if the thread must end."""
        with self._changed:
            while not self.is_closing:
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
