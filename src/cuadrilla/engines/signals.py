"""What ends a training that somebody watches: Ctrl-C, a signal, a closed terminal."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.home import Home
from cuadrilla.messages import Message


@contextmanager
def stop_on_signals(
    request_stop: Callable[[str], None], *, answer: Callable[[str], None], home: Home | None = None
) -> Iterator[None]:
    """Ctrl-C or SIGTERM once: checkpoint and stop; twice: leave at once.

    `answer` is told in the signal's handler that it was heard.

    A closed terminal (SIGHUP) ends a crew's coordinator, which nobody would find again, unless it was started with
    `nohup`; other training goes on. `home`: of a coordinator, where `cuadrilla down` says that the signal is its.
    """
    received: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(INTERRUPTED_EXIT_CODE)
        request_stop(Message("the run was stopped by {what}", what=_who_sent(number, home)))
        answer(Message("stopping   after this pass; once more: at once, without saving"))

    def hung_up(_number: int, _frame: FrameType | None) -> None:  # kernel and shell both say so: twice is no haste
        request_stop(Message("the run was stopped by its closed terminal"))

    wanted: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGINT: handler, signal.SIGTERM: handler}
    before = {number: signal.signal(number, action) for number, action in wanted.items()}
    if hasattr(signal, "SIGHUP"):
        ends = home is not None and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hung_up if ends else signal.SIG_IGN)
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _who_sent(number: int, home: Home | None) -> str:
    if number == signal.SIGINT:
        return "Ctrl-C"
    return "`cuadrilla down`" if home is not None and home.goes_down() else signal.Signals(number).name
