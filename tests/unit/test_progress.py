"""The progress of a training with long steps: a line within a step."""

import pytest

from cuadrilla.cli.progress import LINE_SECONDS, ProgressSink
from tests.clock import Clock


def test_a_long_step_is_shown_before_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    sink = ProgressSink(total_versions=10, done=0, clock=clock)
    clock.now = 1.0
    sink.working(1, 0.01)  # the first that is heard: workers took a second to begin
    assert capsys.readouterr().err == ""
    clock.now = 6.0
    sink.working(1, 0.1)  # a step takes a minute
    assert capsys.readouterr().err == "step 1/10  10% done in 5 s  ETA 9 min\n"
    clock.now = 7.0
    sink.working(1, 0.12)
    assert capsys.readouterr().err == ""
    clock.now = 60.0
    sink.log(1, {"loss": 2.0, "tokens": 100, "tokens_per_second": 1.7})
    said = capsys.readouterr().err
    assert said.startswith("step 1/10  loss 2.000")
    assert said.endswith("ETA 9 min\n")
    clock.now = 60.0 + LINE_SECONDS
    sink.working(2, 1 / 6)
    assert capsys.readouterr().err == "step 2/10  17% done in 10 s  ETA 9 min\n"
