"""Contributions that look wrong, by hand: none of a gradient, or all of it ten times too large."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cuadrilla.link.base import Contribution, Hello, Lease, Stop, Version
from cuadrilla.link.inproc import InProcLink
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.setup import RunContext
from tests.runs import prepare, workers
from tests.tasks import RaggedRegression
from tests.transports import Ends

SETS = ("train.batch_sequences=2", "train.unit_sequences=1", "optim.kind=adamw", workers([1, 1]))


class Line(RaggedRegression):
    def model(self) -> nn.Module:
        return nn.Linear(12, 1, bias=False)


class Puppet:
    """A worker moved by hand, which needs a second to take something."""

    def __init__(self, link: InProcLink, clock: list[float], *, environment: dict[str, str]) -> None:
        self.link = link
        self.clock = clock
        self.lease: Lease | None = None
        link.call(Hello(speed_hint=1.0, environment=environment))

    def take(self) -> tuple[int, ...]:
        """The units that it is to compute now; none if it was sent away."""
        self.clock[0] += 1.0
        event = self.link.next_event()
        while isinstance(event, Version):
            event = self.link.next_event()
        self.lease = None if isinstance(event, Stop) else event
        return self.lease.units if self.lease else ()

    def answer(self, gradient: float, *, loss: float = 1.0) -> None:
        assert self.lease is not None
        tensors = {"weight": torch.full((1, 12), gradient)}
        answer = Contribution(lease_id=self.lease.lease_id, tokens=1, loss_sum=loss, tensors=tensors)
        self.link.call(answer)


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def context(request: pytest.FixtureRequest, tmp_path: Path, clock: list[float]) -> Iterator[RunContext]:
    steps = f"train.steps={getattr(request, 'param', 3)}"
    made = prepare(tmp_path, Line(), *SETS, steps, clock=lambda: clock[0])
    yield made
    made.store.close()


def open_crew(context: RunContext, clock: list[float]) -> tuple[Puppet, Puppet]:
    server = Ends(context.coordination.receive)
    context.coordination.open(server.send)
    environment = code_fingerprint(context.task, context.model)
    return (
        Puppet(server.connect("a"), clock, environment=environment),
        Puppet(server.connect("b"), clock, environment=environment),
    )


def named(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(RunDir(tmp_path).events) if row["event"] == kind]


def test_a_sick_device_is_sent_away_at_the_second_round(
    context: RunContext, clock: list[float], tmp_path: Path
) -> None:
    a, b = open_crew(context, clock)
    for _ in range(2):
        assert [len(who.take()) for who in (a, b)] == [1, 1]
        sick = b.lease
        a.answer(1.0)
        b.answer(0.0)
        assert sick is not None
        assert a.take() == sick.units
        a.answer(1.0)
    assert b.take() == ()
    assert [(row["worker"], row["units"]) for row in named(tmp_path, "all-zero gradient")] == [("b", [1]), ("b", [3])]
    assert [row["worker"] for row in named(tmp_path, "evicted")] == ["b"]
    assert named(tmp_path, "units skipped") == []


def test_what_two_devices_agree_on_counts(context: RunContext, clock: list[float], tmp_path: Path) -> None:
    """A unit from which nothing can be learned: its tokens count, and nobody is to blame."""
    a, b = open_crew(context, clock)
    for _ in range(3):
        units = [who.take() for who in (a, b)]
        a.answer(1.0)
        b.answer(0.0)
        assert a.take() == units[1]
        a.answer(0.0)
    assert [who.take() for who in (a, b)] == [(), ()]
    assert named(tmp_path, "evicted") == named(tmp_path, "units skipped") == []
    assert [row["units"] for row in named(tmp_path, "confirmed")] == [[1], [3], [5]]
    assert context.coordination.outcome is not None
    assert context.coordination.outcome.tokens == 6


@pytest.mark.parametrize(("again", "evicted"), [(1000.0, []), (1.0, ["b"])])
def test_what_another_finds_as_large_counts_and_who_sent_it_is_not_blamed(
    context: RunContext, clock: list[float], tmp_path: Path, again: float, evicted: list[str]
) -> None:
    """By nature, or because a device is sick: whoever computes it next knows."""
    a, b = open_crew(context, clock)
    for _ in range(2):
        units = [who.take() for who in (a, b)]
        a.answer(1.0)
        b.answer(1000.0)
        assert a.take() == units[1]
        a.answer(again)
    assert [row["worker"] for row in named(tmp_path, "outlier")] == ["b", "b"]
    assert [row["units"] for row in named(tmp_path, "confirmed")] == ([] if evicted else [[1], [3]])
    assert [row["worker"] for row in named(tmp_path, "evicted")] == evicted
    assert named(tmp_path, "units skipped") == []


def test_where_nobody_has_a_gradient_nothing_can_be_compared(
    context: RunContext, clock: list[float], tmp_path: Path
) -> None:
    a, b = open_crew(context, clock)
    for who in (a, b):
        who.take()
        who.answer(0.0)
    assert [row["workers"] for row in named(tmp_path, "the gradient is exactly zero")] == [["a", "b"]]
    assert named(tmp_path, "all-zero gradient") == []


@pytest.mark.parametrize("context", [50], indirect=True)
def test_a_loss_ten_times_too_large_is_skipped_and_named(
    context: RunContext, clock: list[float], tmp_path: Path
) -> None:
    """A size that honest contributions can have, too: no reason to doubt a device, the guard skips the update."""
    a, b = open_crew(context, clock)
    weights = []
    for step in range(1, 43):
        units = [who.take() for who in (a, b)]
        if step == 41:
            suspects = units[1]
        factor = 10.0 if step == 41 else 1.0
        a.answer(1.0)
        b.answer(factor, loss=factor)
        weights.append(next(context.model.parameters()).detach().clone())
    assert torch.equal(weights[40], weights[39])
    assert not torch.equal(weights[41], weights[40])
    [skipped] = named(tmp_path, "update skipped")
    assert (skipped["version"], skipped["units"]) == (41, [80, 81])
    assert (skipped["highest"], skipped["highest_units"]) == ("b", list(suspects))
