"""What goes wrong inside a service, for its log: of its start and its end everything, of a call what a stranger cannot
have written.

uvicorn tells both by one logger, and with them what strangers send. `Faults` stands in that logger's place.

Invariants
* Of an error in a call the log has its kind and the places in the code, not what it says: a caller's text may be in it.
* Each kind of error at each place is told once in `QUIET_SECONDS`, with how often it came: no caller who finds a
  mistake of ours can fill a disk with it.
* What breaks the protocol, and what ends because the caller has left or the service ends, is no error.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuadrilla.serve.edge import Application, Receive, Scope, Send

SERVERS_LOGGER = "uvicorn.error"
QUIET_SECONDS = 60.0
MOST_CAUSES = 8
LIFESPAN_MODULE = "on"
"""In which uvicorn tells of an application's start and end; `Kept` knows more of them."""

log = logging.getLogger(__name__)


def where(error: BaseException) -> str:
    """Its kind and the places in the code, of its causes, too; not what any of them says."""
    told: list[str] = []
    left: list[BaseException | None] = [error]
    while left and len(told) < MOST_CAUSES:
        if (one := left.pop(0)) is not None:
            told.append(f"{type(one).__name__}\n{''.join(traceback.format_tb(one.__traceback__))}".rstrip())
            left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left.append(one.__cause__ or (None if one.__suppress_context__ else one.__context__))
    return "\n".join(told)


class Rarely:
    """Counts what goes wrong, so that each kind is told once in `QUIET_SECONDS`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until: dict[str, float] = {}  # as many as there are places in the code
        self._untold: dict[str, int] = {}

    def times(self, what: str) -> int:
        """How often it happened since it was told last, if it is to be told now; else 0."""
        now = self._clock()
        self._untold[what] = self._untold.get(what, 0) + 1
        if now < self._quiet_until.get(what, 0.0):
            return 0
        self._quiet_until[what] = now + QUIET_SECONDS
        return self._untold.pop(what)


class Faults(logging.Handler):
    """Hears what uvicorn and the event loop log as errors, and tells in our own log what is worth it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.ERROR)
        self._rarely = Rarely(clock=clock)

    def emit(self, record: logging.LogRecord) -> None:
        if record.module != LIFESPAN_MODULE:
            self._hear(str(record.msg), record.exc_info[1] if record.exc_info else None)

    def hear_loop(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of a callback that has failed: `loop.set_exception_handler`."""
        self._hear(str(context.get("message")), context.get("exception"))

    def _hear(self, said: str, error: BaseException | None) -> None:
        """`said`: by a library, without the values in it."""
        if isinstance(error, asyncio.CancelledError):
            return
        what = said.strip() if error is None else where(error)
        if times := self._rarely.times(what):
            log.error("the service has made a mistake, %s times: %s", times, what)


@contextmanager
def told_by_us(faults: Faults) -> Iterator[None]:
    """What uvicorn logs meanwhile is heard by `faults`, and by nobody else."""
    logger = logging.getLogger(SERVERS_LOGGER)
    level, propagates, handlers = logger.level, logger.propagate, logger.handlers
    logger.setLevel(logging.ERROR)
    logger.propagate, logger.handlers = False, [faults]
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagates, handlers


class Kept:
    """`app`; `failure`: with what its start or its end has failed. No caller has any part in that."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self.failure: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except BaseException as error:
            if scope["type"] == "lifespan" and not isinstance(error, asyncio.CancelledError):
                self.failure = error
            raise
