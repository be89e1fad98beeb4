"""Practice: a slower worker's passes take longer in proportion, and nothing else does. Statistics of its time."""

import threading

import pytest
import torch

from cuadrilla.link.base import Contribution, Lease, Progress, TensorRef, Tensors, ToCoordinator, ToWorker
from cuadrilla.link.inproc import InProcLink
from cuadrilla.link.practice import LINE_SECONDS, PracticeLink, Shape
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> PracticeLink:
    return PracticeLink(InProcLink(lambda _: None), shape=Shape(speed=0.1), clock=clock, sleep=clock.spend)


def one_pass(link: PracticeLink, clock: Clock, *, seconds: float) -> float:
    """Make a pass of this length behind the link; the seconds that it takes there."""
    began = clock()
    clock.spend(seconds)
    link.call(Progress(micro_steps=1))
    return clock() - began


def test_passes_take_as_long_as_the_speed_says(link: PracticeLink, clock: Clock) -> None:
    taken = [one_pass(link, clock, seconds=seconds) for seconds in (0.5, 0.2, 0.6)]
    assert taken == pytest.approx([5.0, 2.0, 6.0])


def test_a_contribution_takes_as_long_as_its_tensors(clock: Clock) -> None:
    """1.5 s: 800 bits at 800 bits per second, and twice the delay, for the tensors and for the message."""
    heard: list[float] = []
    shape = Shape(bits_per_second=800.0, delay_seconds=0.25)
    link = PracticeLink(InProcLink(lambda _: heard.append(clock())), shape=shape, clock=clock, sleep=clock.spend)
    link.call(Contribution(lease_id=1, tokens=1, loss_sum=0.0, tensors={"w": torch.zeros(25)}))
    assert heard == [clock()] == [1.5]


def test_a_process_that_was_stopped_does_not_pay_for_it(link: PracticeLink, clock: Clock) -> None:
    one_pass(link, clock, seconds=0.1)
    assert one_pass(link, clock, seconds=60.1) < 64
    assert one_pass(link, clock, seconds=0.1) == pytest.approx(1.0)


class Held:
    """A link whose events come when the test lets them, and whose tensors take four seconds."""

    def __init__(self, clock: Clock, *events: ToWorker) -> None:
        self.clock, self.events = clock, list(events)
        self.waits, self.go = threading.Event(), threading.Event()

    def call(self, message: ToCoordinator) -> None:
        self.clock.spend(4.0 if isinstance(message, Contribution) and message.tensors else 0.0)

    def next_event(self) -> ToWorker:
        self.waits.set()
        assert self.go.wait(10)
        return self.events.pop(0)

    def interrupted(self) -> bool:
        return False

    def download(self, ref: TensorRef) -> Tensors:
        self.clock.spend(4.0)
        return {"w": torch.zeros(1000)}


def lease(version: int, *, units: int) -> Lease:
    return Lease(lease_id=version, version=version, units=tuple(range(units)), planned_tokens=0)


def test_what_a_worker_does(clock: Clock) -> None:
    inner = Held(clock, lease(1, units=1))
    link = PracticeLink(inner, clock=clock)
    assert link.poll().phase == "loading"
    waiting = threading.Thread(target=link.next_event)
    waiting.start()
    assert inner.waits.wait(10)
    clock.now = 4.0
    assert (link.poll().phase, link.poll().waiting_part) == ("waiting", 0.0)
    clock.now = 6.0
    inner.go.set()
    waiting.join()
    clock.now = 8.0
    spent = link.poll()
    assert (spent.phase, spent.waiting_part, spent.sent_bytes_per_second) == ("computing", 0.5, None)


def test_speeds_are_those_while_something_travels(clock: Clock) -> None:
    link = PracticeLink(Held(clock), clock=clock)
    link.download(None)
    clock.spend(100.0)
    link.call(Contribution(lease_id=1, tokens=1, loss_sum=1.0, tensors={"w": torch.zeros(2000)}))
    spent = link.poll()
    assert (spent.received_bytes_per_second, spent.sent_bytes_per_second) == (4000 / 4, 8000 / 4)


def test_step_share_and_speed_are_said_at_once_and_then_now_and_then(clock: Clock) -> None:
    """Leases of three, four and eight of the step's eight units. The second comes too soon for a line of its own."""
    inner, said = Held(clock, lease(7, units=3), lease(8, units=4), lease(9, units=8)), list[str]()
    inner.go.set()
    link = PracticeLink(inner, tell=said.append, units_per_step=8, clock=clock)
    for seconds in (2.0, 4.0, LINE_SECONDS - 4.0):
        given = link.next_event()
        assert isinstance(given, Lease)
        clock.spend(seconds)
        link.call(Contribution(lease_id=given.lease_id, tokens=1000 * len(given.units), loss_sum=0.0, tensors={}))
    assert said == ["step 8  share 38 %  1,500 tokens/s", "step 10  share 100 %  1,333 tokens/s"]
