"""Signals that end work: Ctrl-C, `kill`, a closed terminal."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.messages import Message

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handling(handlers: Mapping[int, Handler | signal.Handlers]) -> Iterator[None]:
    """Handle these signals while the block runs. For the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stop_on_signals(request_stop: Callable[[str], object], *, answer: Callable[[], object]) -> Iterator[None]:
    """At the first Ctrl-C or SIGTERM call `request_stop` with the reason, and then `answer`, both in the handler. At
    the second end the process at once. A closed terminal (SIGHUP) stops nothing.
    """
    received: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(INTERRUPTED_EXIT_CODE)
        what = "Ctrl-C" if number == signal.SIGINT else Message("cuadrilla stop or SIGTERM")
        request_stop(Message("the run was stopped by {what}", what=what))
        answer()

    handlers: dict[int, Handler | signal.Handlers] = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = signal.SIG_IGN
    with handling(handlers):
        yield
