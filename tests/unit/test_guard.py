"""The guard skips a spike, rolls back after three, gives up after `rollbacks`, and judges the same after a resume."""

import math

import pytest

from cuadrilla.config import GuardSection
from cuadrilla.train.guard import Guard, Verdict


def calm(guard: Guard, updates: int = 60) -> None:
    for i in range(updates):
        assert guard.judge(loss=5.0 + 0.1 * (i % 3), norm=1.0 + 0.2 * (i % 2)) is Verdict.OK


@pytest.mark.parametrize(("loss", "norm"), [(50.0, 1.0), (5.0, 1e6), (math.nan, 1.0), (5.0, math.inf)])
def test_a_spike_is_skipped_and_forgotten(loss: float, norm: float) -> None:
    guard = Guard(section=GuardSection())
    calm(guard)
    mean = guard.loss.mean
    assert guard.judge(loss=loss, norm=norm) is Verdict.SKIP
    assert guard.loss.mean == mean
    calm(guard)


@pytest.mark.parametrize(("loss", "norm"), [(4.375, 0.5), (4.1, 0.9)])
def test_a_passage_that_is_a_little_harder_is_no_spike(loss: float, norm: float) -> None:
    """This was seen with 256 tokens in a step, after steps whose loss and norm differed by 2 %."""
    guard = Guard(section=GuardSection())
    for i in range(60):
        guard.judge(loss=4.1 * (1 + 0.02 * (i % 2)), norm=0.5 * (1 + 0.02 * (i % 2)))
    assert guard.judge(loss=loss, norm=norm) is Verdict.OK
    assert guard.judge(loss=2 * loss, norm=norm) is Verdict.SKIP
    assert guard.judge(loss=loss, norm=5 * norm) is Verdict.SKIP


def test_the_warm_up_and_zero_sigmas_are_never_judged() -> None:
    guard = Guard(section=GuardSection())
    assert [guard.judge(loss=10.0**i, norm=1.0) for i in range(5)] == [Verdict.OK] * 5
    off = Guard(section=GuardSection(spike_sigmas=0))
    calm(off)
    assert off.judge(loss=1e9, norm=1.0) is Verdict.OK


def test_the_state_survives_a_resume() -> None:
    a, b = Guard(section=GuardSection()), Guard(section=GuardSection())
    calm(a)
    b.load_state(a.state())
    for loss in (5.0, 5.2, 90.0, 5.1):
        assert a.judge(loss=loss, norm=1.0) is b.judge(loss=loss, norm=1.0)
    assert a.state() == b.state()
