"""The coordinator's thread waits no longer than it should, whatever a signal's handler does meanwhile."""

import signal
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cuadrilla.train.thread import CoordinatorThread

pytestmark = pytest.mark.unit


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such alarms")
@pytest.mark.timeout(30)
def test_a_signal_that_takes_longer_than_the_wait_does_not_make_it_endless() -> None:
    """Ctrl-C on a coordinator without workers: its handler writes to a terminal, which may take its time."""
    idle = SimpleNamespace(is_over=False, heard=None, reported=None, result=lambda: "ended")
    ticks = iter((False, True))
    idle.tick = lambda: setattr(idle, "is_over", next(ticks))
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.3))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert CoordinatorThread(cast(Any, idle)).serve(lambda: None) == cast(Any, "ended")
    finally:
        signal.signal(signal.SIGALRM, before)
