"""Impossible numbers of a worker never reach the weights, and the run goes on without that worker."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Goodbye, Hello, Lease, Progress, Stop, ToCoordinator, ToWorker
from cuadrilla.model.task import TaskDefaults
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.sync.strategy import GRADIENT
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.loop import environment
from tests.runs import prepare, workers
from tests.sessions import answer, worker_half
from tests.tasks import Normalised, RaggedRegression

LEASE_SECONDS = 1.0


class Bounded(RaggedRegression):
    """A task that declares how many tokens an example can have at most."""

    defaults = TaskDefaults(length=1, max_length=3)


Lie = Callable[[Contribution], Mapping[str, Any]]
"""False values for the fields of an honest contribution."""


class PlayedRun:
    """The coordinator of a run, and the messages to and from its members. Time passes when a member computes."""

    def __init__(self, folder: Path, *sets: str, task: RaggedRegression | None = None) -> None:
        self.now = 0.0
        self.folder = folder
        sets = (workers([1.0, 1.0]), *sets)
        self.context = prepare(folder, task or Bounded(), *sets, clock=lambda: self.now)
        self.coordination = self.context.coordination
        self.sent: defaultdict[str, list[ToWorker]] = defaultdict(list)
        self.coordination.open(lambda worker, message: self.sent[worker].append(message))
        forms = self.context.strategy.forms(self.context.model, self.context.recipe)
        self.layout = wire.Layout.of(forms[0].contributions[0])

    def says(self, worker: str, message: ToCoordinator, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Deliver a message as the link would. Raises LinkError for values that a message cannot have."""
        heard = wire.decode(wire.encode(message), type(message))
        if isinstance(heard, Contribution) and heard.valid:
            blob = self.layout.pack(tensors or {})
            heard = replace(heard, tensors=self.layout.views(blob))
        self.coordination.deliver(worker, heard)
        self.coordination.work_off()

    def joins(self, *names: str, speed: float = 1.0) -> None:
        said = {**code_fingerprint(self.context.task, self.context.model), **environment(self.context.device)}
        for name in names:
            self.says(name, Hello(speed_hint=speed, environment=said))

    def lease_of(self, worker: str) -> Lease | None:
        leases = [message for message in self.sent[worker] if isinstance(message, Lease)]
        held = self.coordination._work.leases.get(worker)
        return leases[-1] if held is not None and leases[-1].lease_id == held.lease_id else None

    def answers(self, worker: str, lie: Lie | None = None, *, seconds: float = LEASE_SECONDS) -> None:
        """Answer the worker's lease, if it has one, with the honest contribution as changed by the lie."""
        lease = self.lease_of(worker)
        if lease is None:
            return
        self.now += seconds
        right = replace(self.honest(lease), transfer_seconds=0.0)
        said = replace(right, **lie(right)) if lie else right
        self.says(worker, replace(said, tensors={}), said.tensors)

    def honest(self, lease: Lease) -> Contribution:
        model, config = copy.deepcopy(self.context.model), self.context.config
        return answer(
            lease,
            task=self.context.task,
            model=model,
            sync=worker_half(model, strict=config.sync.strict),
            weights=dict(self.coordination.merge.version(steps=1)),
            section=config.train,
        )

    def plays(self, rounds: int, lie: Lie) -> None:
        """Play rounds in which `mala` lies and `ana` does not."""
        for _ in range(rounds):
            self.answers("mala", lie)
            self.answers("ana")

    def units(self, *workers: str) -> list[tuple[int, ...]]:
        """The units that each worker has to compute now; none if it was sent away."""
        return [lease.units if (lease := self.lease_of(worker)) else () for worker in workers]

    def both(self, a: Lie, b: Lie) -> None:
        """`a` and `b` answer at the same time."""
        self.answers("a", a)
        self.answers("b", b, seconds=0.0)

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(RunDir(self.folder).events) if row["event"] == kind]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., PlayedRun]]:
    made: list[PlayedRun] = []

    def begin(*sets: str, **options: Any) -> PlayedRun:
        made.append(PlayedRun(tmp_path / f"run-{len(made)}", *sets, **options))
        return made[-1]

    yield begin
    for crew in made:
        crew.context.store.close()


def scaled(tensors: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: (tensor * factor).to(tensor.dtype) for name, tensor in tensors.items()}


LIES: dict[str, Lie] = {
    "a thousand times the gradient": lambda right: {"tensors": scaled(right.tensors, 1e3)},
    "all tokens of the world": lambda _: {"tokens": 2**63 - 1},
    "a loss without end": lambda _: {"loss_sum": 1.7e308},
}


@pytest.mark.parametrize("strict", ["false", "true"])
@pytest.mark.parametrize("lie", LIES)
def test_whose_numbers_cannot_be_right_is_left_out(make: Callable[..., PlayedRun], lie: str, strict: str) -> None:
    crew = make(f"sync.strict={strict}", "train.steps=12")
    crew.joins("mala", "ana")
    crew.plays(60, LIES[lie])
    assert [row["worker"] for row in crew.named("evicted")] == ["mala"]
    assert crew.named("units skipped") == []
    assert crew.coordination.failure is None
    assert crew.coordination.outcome is not None
    assert crew.coordination.outcome.complete
    assert crew.coordination.outcome.tokens < 12 * 997  # no token of the lie was counted


def test_running_statistics_that_cannot_be_are_refused(make: Callable[..., PlayedRun]) -> None:
    crew = make("train.steps=8", task=Normalised())

    def lie(right: Contribution) -> Mapping[str, Any]:
        false = {name: tensor - 2**50 if "running_var" in name else tensor for name, tensor in right.tensors.items()}
        return {"tensors": false}

    crew.joins("mala", "ana")
    crew.plays(40, lie)
    assert [row["worker"] for row in crew.named("evicted")] == ["mala"]
    assert crew.coordination.outcome is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in crew.context.model.state_dict().values())


# Suspicious contributions: gradients that are far too large

SUSPECTS = ("train.batch_sequences=2", "train.unit_sequences=1", "optim.kind=adamw")


class Line(RaggedRegression):
    def model(self) -> nn.Module:
        return nn.Linear(12, 1, bias=False)


def gradient(value: float, *, loss: float = 1.0) -> Lie:
    return lambda _: {"tokens": 1, "loss_sum": loss, "tensors": {f"{GRADIENT}weight": torch.full((1, 12), value)}}


def pair(make: Callable[..., PlayedRun], *, steps: int) -> PlayedRun:
    """A crew of `a` and `b`, with a unit each."""
    crew = make(*SUSPECTS, f"train.steps={steps}", task=Line())
    crew.joins("a", "b")
    assert [len(units) for units in crew.units("a", "b")] == [1, 1]
    return crew


def test_where_nobody_has_a_gradient_nothing_can_be_compared(make: Callable[..., PlayedRun]) -> None:
    crew = pair(make, steps=3)
    crew.both(gradient(0.0), gradient(0.0))
    assert [row["workers"] for row in crew.named("the gradient is exactly zero")] == [["a", "b"]]


def test_a_loss_ten_times_too_large_is_skipped_and_named(make: Callable[..., PlayedRun]) -> None:
    """Honest contributions can be as large, so no device is suspected. The guard skips the update."""
    crew, weights = pair(make, steps=50), []
    for step in range(1, 43):
        suspects = crew.units("b") if step == 41 else []
        factor = 10.0 if step == 41 else 1.0
        crew.both(gradient(1.0), gradient(factor, loss=factor))
        weights.append(next(crew.context.model.parameters()).detach().clone())
        if suspects:
            [skipped] = crew.named("update skipped")
            assert (skipped["version"], skipped["units"]) == (41, [80, 81])
            assert (skipped["highest"], [tuple(skipped["highest_units"])]) == ("b", suspects)
    assert torch.equal(weights[40], weights[39])
    assert not torch.equal(weights[41], weights[40])


# Well-formed messages with any numbers

NUMBERS = st.sampled_from([0, 1, 2, 9, 997, 2**31, 2**53, 2**63 - 1])
FLOATS = st.sampled_from([0.0, -0.0, 5e-324, 1e-9, 1.0, -1.0, 1e12, 1e300, -1e300, 1.7e308, float("inf"), float("nan")])
VALUES = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e18, -3e38, float("nan"), float("inf")])
SAID = st.one_of(
    st.builds(lambda speed: ("hello", speed), FLOATS),
    st.builds(lambda passes: ("progress", passes), NUMBERS),
    st.builds(
        lambda *said: ("contribute", *said), NUMBERS, NUMBERS, FLOATS, FLOATS, VALUES, st.booleans(), st.booleans()
    ),
    st.just(("goodbye",)),
    st.builds(lambda seconds: ("time", seconds), st.sampled_from([0.0, 1e-9, 0.6, 30.0, 1e6])),
    st.just(("ana",)),
)


@pytest.mark.parametrize("kind", ["exact", pytest.param("strict", marks=pytest.mark.thorough)])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SAID, max_size=60))
@example(said=[("ana",)])
def test_no_numbers_end_the_run(
    kind: str, tmp_path_factory: pytest.TempPathFactory, said: list[tuple[Any, ...]]
) -> None:
    strategy = {"exact": (), "strict": ("sync.strict=true",)}
    crew = PlayedRun(tmp_path_factory.mktemp("run"), *strategy[kind], "train.steps=6")
    crew.joins("mala", "ana")
    try:
        for words in said:
            speak(crew, words)
            crew.coordination.tick()
            assert crew.coordination.failure is None
        crew.coordination.deliver("mala", Goodbye(reason="gone"))
        crew.coordination.tick()  # its units go to ana, who may have none now
        for _ in range(500):  # a unit after another at worst
            honest(crew)
        assert crew.coordination.failure is None
        assert crew.coordination.outcome is not None
        assert crew.coordination.outcome.complete
        assert all(bool(torch.isfinite(tensor).all()) for tensor in crew.context.model.state_dict().values())
    finally:
        crew.context.store.close()


def honest(crew: PlayedRun) -> None:
    """`ana` answers her lease. If she was sent away she joins again first."""
    if any(isinstance(message, Stop) for message in crew.sent["ana"]):
        crew.sent["ana"].clear()
        crew.joins("ana")
    lease = crew.lease_of("ana")
    if lease is not None:
        crew.now += 0.1
        like = {name: torch.full(shape, 1, dtype=dtype) for name, dtype, shape in crew.layout.entries}
        crew.says("ana", Contribution(lease_id=lease.lease_id, tokens=9, loss_sum=9.0), like)


def speak(crew: PlayedRun, words: tuple[Any, ...]) -> None:
    match words:
        case ("time", seconds):
            crew.now += seconds
            for name in ("mala", "ana"):
                crew.coordination.deliver(name, Progress(micro_steps=int(crew.now * 10) + 1))
        case ("ana",):
            honest(crew)
        case _:
            try:
                said_by_mala(crew, words)
            except LinkError:
                crew.coordination.deliver("mala", Goodbye(reason="nonsense"))  # as the transport would


def said_by_mala(crew: PlayedRun, words: tuple[Any, ...]) -> None:
    match words:
        case ("hello", speed):
            crew.joins("mala", speed=speed)
        case ("progress", passes):
            crew.says("mala", Progress(micro_steps=passes))
        case ("goodbye",):
            crew.says("mala", Goodbye(reason="tired"))
        case ("contribute", lease_id, tokens, loss, transfer, value, valid, own):
            lease = crew.lease_of("mala")
            number = lease.lease_id if own and lease is not None else lease_id
            tensors = {
                name: torch.full(shape, value if dtype.is_floating_point else min(tokens, 2**63 - 1), dtype=dtype)
                for name, dtype, shape in crew.layout.entries
            }
            said = Contribution(lease_id=number, tokens=tokens, loss_sum=loss, transfer_seconds=transfer, valid=valid)
            crew.says("mala", said, tensors)
