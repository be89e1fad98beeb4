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
    """While the block runs, in the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stop_on_signals(
    request_stop: Callable[[str], None], *, answer: Callable[[str], None], coordinates: bool = False
) -> Iterator[None]:
    """Ctrl-C or SIGTERM once: checkpoint and stop; twice: leave at once.

    `answer` is told in the signal's handler that it was heard.

    A closed terminal (SIGHUP) ends a crew's coordinator, which nobody would find again, unless it was started with
    `nohup`; other training goes on.
    """
    received: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(INTERRUPTED_EXIT_CODE)
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        request_stop(Message("the run was stopped by {what}", what=what))
        answer(Message("stopping   after this pass; once more: at once, without saving"))

    def hung_up(_number: int, _frame: FrameType | None) -> None:  # kernel and shell both say so: twice is no haste
        request_stop(Message("the run was stopped by its closed terminal"))

    handlers: dict[int, Handler | signal.Handlers] = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if hasattr(signal, "SIGHUP"):
        ends = coordinates and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        handlers[signal.SIGHUP] = hung_up if ends else signal.SIG_IGN
    with handling(handlers):
        yield
