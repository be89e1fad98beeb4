"""The coordinator's thread does not wait too long, whatever a signal's handler does meanwhile."""

import signal
import sys
import time
from pathlib import Path

import pytest

from cuadrilla.link.base import Goodbye, Hello, Progress
from cuadrilla.train.sinks import Sink
from tests.runs import prepare, workers
from tests.tasks import RaggedRegression


class Parts(Sink):
    """Keeps which parts of steps were reported."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def working(self, _step: int, part: float) -> None:
        self.found.append(part)


def test_the_part_that_a_worker_had_done_goes_with_it(tmp_path: Path) -> None:
    parts = Parts()
    context = prepare(tmp_path, RaggedRegression(), sinks=[parts])
    runtime = context.coordination
    runtime.open(lambda _worker, _message: None)
    hello = Hello(speed_hint=1.0)
    for message in (hello, Progress(micro_steps=1, part=0.5), Goodbye(reason="it ends"), hello):
        runtime.receive("a", message)
    runtime.receive("b", Progress(micro_steps=1))
    context.store.close()
    assert parts.found == [0.5]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such alarms")
@pytest.mark.timeout(30)
def test_a_signal_that_takes_longer_than_the_wait_does_not_make_it_endless(tmp_path: Path) -> None:
    """Ctrl-C on a coordinator without workers, while its handler writes to a slow terminal."""
    context = prepare(tmp_path, RaggedRegression(), workers([1.0, 1.0]))
    runtime, before = context.coordination, signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.3))
    polls = iter((lambda: None, lambda: runtime.request_stop("it was asked to")))
    try:
        runtime.open(lambda _worker, _message: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert runtime.serve(lambda: next(polls)()).reason == "it was asked to"
    finally:
        signal.signal(signal.SIGALRM, before)
        context.store.close()
