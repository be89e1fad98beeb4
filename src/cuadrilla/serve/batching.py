"""One thread that continues everybody's sequences together; callers wait for theirs in the event loop.

Invariants
* A call takes part from the next step on if a slot is free, else it waits its turn; the queue is bounded. It leaves at
  the step at which it ends or its caller has gone.
* Whatever a step brings is handed over in one turn of the event loop, in the order of the steps.
* An error in a step ends the calls at hand with the reason `error`, and the thread goes on.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.rows import Reason, Row, Rows
from cuadrilla.model.sampling import Sampling
from cuadrilla.serve.edge import Refusal

LEAST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1, 60
TRIAL_TOKENS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progressed:
    """What came of a row: a token, and why it has ended if it has."""

    token: int | None
    reason: Reason | None


@dataclass(eq=False)
class Call:
    """A row that somebody waits for. Iterate over its steps; leave it with `cancel`."""

    row: Row
    arrived: float = field(default_factory=time.perf_counter)
    began: float = math.nan
    """When it got its slot."""
    cancelled: bool = False
    steps: "asyncio.Queue[Progressed]" = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[Progressed]:
        while True:
            step = await self.steps.get()
            yield step
            if step.reason is not None:
                return

    def cancel(self) -> None:
        """Its slot is free after the step at hand."""
        self.cancelled = True


@dataclass(frozen=True, kw_only=True)
class Busyness:
    """How busy a batcher is. `tokens_per_second`: generated, over the last seconds of work."""

    slots: int
    busy_slots: int
    waiting: int
    tokens_per_second: float


class Batcher:
    """Continues rows of one model. Make it in the event loop that its calls come from; `close` it there."""

    def __init__(self, model: InferenceModel, *, slots: int, most_waiting: int) -> None:
        self._model = model
        self.context = model.config.context
        self._slots, self._most_waiting = slots, most_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._calls: dict[Row, Call] = {}
        self._closing = False
        self._rate = Rate()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="batcher")
        self._thread.start()

    @property
    def load(self) -> Busyness:
        return Busyness(
            slots=self._slots,
            busy_slots=len(self._calls),
            waiting=len(self._waiting),
            tokens_per_second=self._rate.value,
        )

    @property
    def works(self) -> bool:
        """False once its thread has ended, or is to."""
        return not self._closing

    def submit(self, rows: Sequence[Row]) -> list[Call]:
        """All of them, or none. Raises Refusal when so many more cannot wait."""
        calls = [Call(row) for row in rows]
        for call in calls:
            if call.row.reason is not None:  # nothing is to be generated
                call.steps.put_nowait(Progressed(None, call.row.reason))
        waiting = [call for call in calls if call.row.reason is None]
        with self._changed:
            self._check_room(len(waiting))
            self._waiting.extend(waiting)
            self._changed.notify()
        return calls

    def refuse_when_full(self, number: int) -> None:
        """Raises Refusal where so many rows could not be submitted now: before anything is done for them."""
        with self._changed:
            self._check_room(number)

    def _check_room(self, number: int) -> None:
        most = self._slots + self._most_waiting
        if number > most:
            raise Refusal(422, f"that is more than the {most} texts that this service takes at once", param="n")
        if self._closing:
            raise Refusal(503, "the service is ending", code="draining", wait_seconds=LEAST_WAIT_SECONDS)
        if number and len(self._waiting) + len(self._calls) + number > most:
            raise Refusal(429, "too many calls wait already", code="overloaded", wait_seconds=self._patience())

    def end(self) -> None:
        """Calls at hand end with the reason `error`, at once; nothing more is taken."""
        with self._changed:
            ended = [] if self._closing else [*self._calls.values(), *self._waiting]
            self._closing = True
            self._changed.notify()
        for call in ended:
            call.steps.put_nowait(Progressed(None, "error"))

    async def close(self) -> None:
        """Like `end`; the thread ends after its step."""
        self.end()
        await asyncio.to_thread(self._thread.join)

    def _patience(self) -> int:
        """Seconds after which a slot is likely to be free."""
        ahead = sum(call.row.sampling.max_tokens for call in (*self._waiting, *self._calls.values()))
        seconds = ahead / max(self._rate.value, 1e-3) / 2
        return int(min(max(math.ceil(seconds), LEAST_WAIT_SECONDS), MOST_WAIT_SECONDS))

    def _work(self) -> None:
        try:
            self._rows = self._new_rows()  # here: a thread that fills memory has helpers for good (host/threads.py)
            while self._take_in():
                self._step()
        finally:  # also when it is our own mistake: nobody must wait for a thread that is gone
            with self._changed:
                self._closing = True
            self._fail()

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            chosen = self._rows.step()
        except (RuntimeError, ValueError, IndexError) as error:  # torch's errors: out of memory among them
            log.error("a step of generation has failed: %s", error)
            self._fail()
            return
        with self._changed:
            told = [(self._calls[row], Progressed(token, row.reason)) for row, token in chosen]
            for row, _ in chosen:
                if row.reason is not None:
                    del self._calls[row]
        self._rate.add(sum(step.token is not None for _, step in told), time.perf_counter() - began)
        self._tell(told)

    def _take_in(self) -> bool:
        """Who has gone leaves, who waits joins; waits for something to do. False when the thread is to end."""
        with self._changed:
            while True:
                self._let_go()
                while self._waiting and self._rows.free:
                    call = self._waiting.popleft()
                    call.began = time.perf_counter()
                    self._rows.join(call.row)
                    self._calls[call.row] = call
                if self._closing:
                    return False
                if self._calls:
                    return True
                self._changed.wait()

    def _let_go(self) -> None:
        for call in [call for call in self._calls.values() if call.cancelled]:
            self._rows.leave(call.row)
            del self._calls[call.row]
        if any(call.cancelled for call in self._waiting):
            self._waiting = deque(call for call in self._waiting if not call.cancelled)

    def _fail(self) -> None:
        with self._changed:
            ended = [*self._calls.values(), *(self._waiting if self._closing else ())]
            self._calls.clear()
            if self._closing:
                self._waiting.clear()
        self._tell([(call, Progressed(None, "error")) for call in ended])
        if not self._closing:
            self._rows = self._new_rows()

    def _tell(self, told: Sequence[tuple[Call, Progressed]]) -> None:
        def hand_over() -> None:
            for call, step in told:
                call.steps.put_nowait(step)

        if told and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(hand_over)

    def _new_rows(self) -> Rows:
        return Rows(self._model, slots=self._slots)


class Rate:
    """Tokens a second of work, where work of a second ago counts half."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        kept = 0.5**seconds
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds


async def trial(batcher: Batcher, *, token: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens a second of one stream, measured; the first pass, which takes longer, does not count."""
    (call,) = batcher.submit([Row([token], Sampling(temperature=0, max_tokens=TRIAL_TOKENS))])
    times = [clock() async for _ in call]
    return (len(times) - 1) / max(times[-1] - times[0], 1e-9) if len(times) > 1 else 0.0
