"""Ctrl-C where several things are under way: once, they are saved; twice, this process leaves at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cuadrilla.cli.output import say_at_once
from cuadrilla.crew.signals import handling


@contextmanager
def stopping(stopped: threading.Event, *, answer: str) -> Iterator[threading.Event]:
    """SIGINT or SIGTERM sets `stopped`, and a person reads `answer`; another one raises KeyboardInterrupt."""

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            signal.default_int_handler(number, frame)
        stopped.set()
        say_at_once(answer)

    with handling({signal.SIGINT: stop, signal.SIGTERM: stop}):
        yield stopped
