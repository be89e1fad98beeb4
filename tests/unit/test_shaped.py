"""The shaped link: a slower worker's passes take longer in proportion, and nothing else does."""

import pytest
import torch

from cuadrilla.link.base import Computed, Contribution, Progress
from cuadrilla.link.inproc import InProcServer
from cuadrilla.link.shaped import Shape, ShapedLink


class Clock:
    """Time that passes only where somebody spends it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> ShapedLink:
    server = InProcServer(lambda *_: None)
    return ShapedLink(server.connect("ana"), shape=Shape(speed=0.1), clock=clock, sleep=clock.spend)


def one_pass(link: ShapedLink, clock: Clock, *, seconds: float) -> float:
    """How long a pass of so many seconds takes behind the link."""
    began = clock()
    clock.spend(seconds)
    link.call(Progress(micro_steps=1))
    return clock() - began


def test_passes_take_as_long_as_the_speed_says(link: ShapedLink, clock: Clock) -> None:
    taken = [one_pass(link, clock, seconds=seconds) for seconds in (0.5, 0.2, 0.6)]
    assert taken == pytest.approx([5.0, 2.0, 6.0])


def test_a_contribution_takes_as_long_as_its_tensors(clock: Clock) -> None:
    """800 bits at 800 a second, and a delay for them and for the message; then the coordinator has it."""
    heard: list[float] = []
    server = InProcServer(lambda *_: heard.append(clock()))
    shape = Shape(bits_per_second=800.0, delay_seconds=0.25)
    link = ShapedLink(server.connect("ana"), shape=shape, clock=clock, sleep=clock.spend)
    link.call(Contribution(lease_id=1, tokens=1, loss_sum=0.0, tensors={"w": torch.zeros(25)}))
    assert heard == [clock()] == [1.5]


def test_who_says_that_a_lease_is_computed_goes_on_at_once(clock: Clock) -> None:
    """The delay is that of the answer, which travels meanwhile."""
    link = ShapedLink(
        InProcServer(lambda *_: None).connect("ana"), shape=Shape(delay_seconds=0.25), clock=clock, sleep=clock.spend
    )
    link.call(Computed(lease_id=1))
    assert clock() == 0


def test_a_process_that_was_stopped_does_not_pay_for_it(link: ShapedLink, clock: Clock) -> None:
    one_pass(link, clock, seconds=0.1)
    assert one_pass(link, clock, seconds=60.1) < 64
    assert one_pass(link, clock, seconds=0.1) == pytest.approx(1.0)
