"""Exactness of whatever can happen: any split, raggedness and order of answers; and of a long training."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cuadrilla.config import AdamWSection, TrainSection
from cuadrilla.data.prepare import PrepareOptions
from cuadrilla.data.prepare import prepare as prepare_data
from cuadrilla.link.base import Goodbye, Hello, Lease, Stop
from cuadrilla.model.task import TaskDefaults
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import resolve
from cuadrilla.sync import events
from cuadrilla.sync.exact import ExactMerge, ExactWorker
from cuadrilla.sync.membership import Rules
from cuadrilla.train.optim import make_optimizer
from cuadrilla.train.setup import assemble, make_task
from cuadrilla.train.sinks import Scalars
from tests.driver import machine
from tests.runs import workers
from tests.sessions import answer, recipe_of, worker_half
from tests.transports import run_through

LENGTH, FEATURES, UNIT = 5, 6, 2
RELATIVE = 1e-6


# -- any split, any raggedness, any order ------------------------------------------------------------------------------


class RaggedSequences:
    """A regression on sequences of `lengths` 0 to LENGTH, padded; the loss counts what is no padding.

    The targets lie on one side of what a new model says, so that gradients never cancel: 1e-6 of one means something.
    """

    defaults = TaskDefaults(length=LENGTH)

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        counts = torch.arange(LENGTH) < batch["length"][:, None]
        difference = model(batch["x"]).squeeze(-1) - batch["y"]
        return (difference.square() * counts).sum(), int(counts.sum())

    def data(self, split: Literal["train", "val"]) -> "RaggedSequences":
        return self

    def data_hash(self) -> str:
        return "ragged"

    def evaluate(self, model: nn.Module, batches: object) -> dict[str, float]:
        return {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        x = np.random.default_rng(index).standard_normal((LENGTH, FEATURES)).astype(np.float32)
        return {"x": x, "y": np.sin(x.sum(1)) + 3, "length": np.array(self.lengths[index])}


class Crew:
    """The product's coordinator, merge and workers; what happens when is the caller's choice."""

    def __init__(self, task: RaggedSequences, *, rules: Rules, strict: bool) -> None:
        self.task = task
        self.strict = strict
        self.planned_tokens = rules.step_tokens
        model = task.model()
        self.params = dict(model.named_parameters())
        adamw = make_optimizer(AdamWSection(kind="adamw"), is_matrix=is_matrix, dtype=torch.float32)
        self.merge = ExactMerge(model, recipe_of(adamw, lr_factor=1.0, clip_norm=1.0), strict=strict)
        self.machine = machine(rules)
        self.now = 0.0
        self.granted_at: dict[int, float] = {}
        self.models: dict[str, nn.Module] = {}
        self.syncs: dict[str, ExactWorker] = {}
        self.micro_steps: dict[str, int] = {}
        self.leases: dict[int, Lease] = {}
        self.late: dict[int, Lease] = {}
        self.workers: dict[int, str] = {}
        self.gradients: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.do(self.machine.start())

    def do(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Send(worker=worker, message=Lease() as lease):
                    self.workers[lease.lease_id] = worker
                    self.granted_at[lease.lease_id] = self.now
                    self.leases[lease.lease_id] = lease
                case events.Merge():
                    self.merge_round(action)
                case events.Send(message=Stop(reason=reason)):
                    raise AssertionError(reason)

    def merge_round(self, action: events.Merge) -> None:
        if any(answer.contribution.tokens for answer in action.answers):
            reduced = self.merge.reduce(action.answers, planned_tokens=self.planned_tokens)
            self.gradients.append(flat(self.merge.update()))
            self.merge.step(norm=reduced.norm, version=action.version, steps=1)
        self.weights.append(flat(self.params))
        self.send(events.Merged())

    def send(self, event: events.Event) -> None:
        self.do(self.machine.handle(event, self.now))

    def join(self, worker: str, *, speed: float, pass_sequences: int) -> None:
        if worker in self.machine.crew.members:
            self.lose(worker)
        self.models[worker] = model = self.task.model()
        self.syncs[worker] = worker_half(model, strict=self.strict)
        self.micro_steps[worker] = pass_sequences
        self.send(events.Received(worker=worker, message=Hello(speed_hint=speed)))

    def lose(self, worker: str) -> None:
        """What it has in hand comes too late."""
        for lease_id in [lease_id for lease_id in self.leases if self.workers[lease_id] == worker]:
            self.late[lease_id] = self.leases.pop(lease_id)
        self.send(events.Received(worker=worker, message=Goodbye(reason="test")))

    def answer(self, lease_id: int, *, seconds: float) -> None:
        """The worker computes its lease from the newest weights and hands it in; a late one too, with its own.

        `seconds`: after its grant; at once if they are over.
        """
        worker = self.workers[lease_id]
        self.now = max(self.now, self.granted_at[lease_id] + seconds)
        lease = self.leases.pop(lease_id, None) or self.late.pop(lease_id)
        said = answer(
            lease,
            task=self.task,
            model=self.models[worker],
            sync=self.syncs[worker],
            weights=self.params,
            section=TrainSection(batch_sequences=32, unit_sequences=UNIT, pass_sequences=self.micro_steps[worker]),
        )
        self.send(events.Received(worker=worker, message=said))


def is_matrix(_name: str, _parameter: nn.Parameter) -> bool:
    return False


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors.values()])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


SPEEDS = st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0])
PASSES = st.sampled_from([0, 1, 3, 4])  # sequences; 0 is the whole lease at once
HAPPENINGS = st.tuples(st.sampled_from(["answer"] * 6 + ["late", "join", "leave"]), st.integers(0, 999), SPEEDS)


def play(crew: Crew, members: list[tuple[float, int]], happenings: list[tuple[str, int, float]]) -> None:
    """Everybody joins; then what is to happen happens; then all that is left to do is done in order."""
    for index, (speed, pass_sequences) in enumerate(members):
        crew.join(f"worker-{index}", speed=speed, pass_sequences=pass_sequences)
    for what, number, speed in happenings:
        if crew.machine.finished:
            return
        worker = f"worker-{number % len(members)}"
        if what == "answer" and crew.leases:
            crew.answer(sorted(crew.leases)[number % len(crew.leases)], seconds=1 / speed)
        elif what == "late" and crew.late:
            crew.answer(sorted(crew.late)[number % len(crew.late)], seconds=1 / speed)
        elif what == "join":
            crew.join(worker, speed=speed, pass_sequences=number % 5)
        elif what == "leave":
            crew.lose(worker)
    if not crew.machine.crew.members:
        crew.join("worker-0", speed=1.0, pass_sequences=0)
    while not crew.machine.finished:
        crew.answer(min(crew.leases), seconds=1.0)


@pytest.mark.parametrize(
    "strict", [pytest.param(False, id="fp32", marks=pytest.mark.thorough), pytest.param(True, id="strict")]
)
@given(
    lengths=st.lists(st.integers(0, LENGTH), min_size=1, max_size=40),
    num_units=st.integers(1, 9),
    members=st.lists(st.tuples(SPEEDS, PASSES), min_size=1, max_size=6),
    happenings=st.lists(HAPPENINGS, max_size=30),
)
def test_any_split_raggedness_and_order_gives_the_result_of_one_worker(
    strict: bool,
    lengths: list[int],
    num_units: int,
    members: list[tuple[float, int]],
    happenings: list[tuple[str, int, float]],
) -> None:
    """Workers of any speed join, leave, answer in any order and too late, with passes of any size."""
    torch.set_num_threads(1)
    task = RaggedSequences(lengths)
    rules = Rules(units_per_step=num_units, step_tokens=num_units * UNIT * LENGTH, num_steps=3)
    one = Crew(task, rules=rules, strict=strict)
    crew = Crew(task, rules=replace(rules, quorum=len(members)), strict=strict)
    play(one, [(1.0, 0)], [])
    play(crew, members, happenings)
    assert len(one.weights) == len(crew.weights) == 3
    assert len(one.gradients) == len(crew.gradients)
    for ours, theirs in zip(crew.gradients + crew.weights, one.gradients + one.weights, strict=True):
        if strict:
            assert torch.equal(ours, theirs)
        else:
            assert relative(ours, theirs) <= RELATIVE


# -- a long training ---------------------------------------------------------------------------------------------------

STEPS = 300
RUN = """
[data]
folder = "{data}"
[model]
layers = 2
heads = 2
width = 32
context = 32
[train]
steps = {steps}
batch_sequences = 12
unit_sequences = 1
precision = "fp32"
threads = 1
device = "cpu"
[optim]
kind = "adamw"
[checkpoint]
every_seconds = 0
journal = "off"
[sample]
tokens = 0
[evaluate]
every_tokens = 1_000_000_000
sequences = 1
"""


class Curve:
    """A sink that keeps the loss of each step, and how many workers took part."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.most_workers = 0

    def log(self, _step: int, scalars: Scalars) -> None:
        self.losses.append(float(scalars["loss"]))
        self.most_workers = max(self.most_workers, int(scalars["workers"]))

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    prepare_data(["cuentos:2000"], out=folder / "data", options=PrepareOptions(vocab=512))
    return folder / "data"


@pytest.mark.thorough
def test_the_loss_curve_of_unequal_workers_is_that_of_one(tmp_path: Path, stories: Path) -> None:
    """A GPT-2 on Spanish stories, fp32, 300 steps: the losses are at most 1e-3 apart at any step."""
    curves = []
    for name, speeds in (("one", [1.0]), ("crew", [1.0, 0.7, 0.4])):
        (tmp_path / name).mkdir()
        config = resolve(RUN.format(data=stories, steps=STEPS), sets=[workers(speeds)]).config
        curve, run = Curve(), RunDir(tmp_path / name)
        run_through("inproc", assemble(config, run, task=make_task(config, run.path), sinks=[curve]))
        curves.append(curve)
    one, crew = curves
    assert crew.most_workers == 3
    assert len(crew.losses) == STEPS
    assert one.losses[-1] < one.losses[0] - 1.5  # it learned
    largest = max(abs(a - b) for a, b in zip(crew.losses, one.losses, strict=True))
    print(f"largest difference of a step's loss {largest:.2g}")  # pytest -rP shows it
    assert largest <= 1e-3
