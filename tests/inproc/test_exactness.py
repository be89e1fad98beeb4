"""Exactness for any split into leases, any lengths of sequences and any order of answers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cuadrilla.config import AdamWSection, TrainSection
from cuadrilla.link.base import Contribution, Lease
from cuadrilla.model.task import TaskDefaults
from cuadrilla.sync import events
from cuadrilla.sync.events import Grant
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.sync.membership import Rules
from cuadrilla.sync.merge import Merger
from cuadrilla.train.optim import make_optimizer
from tests import driver
from tests.driver import machine
from tests.sessions import answer, recipe_of, worker_half

LENGTH, FEATURES, UNIT = 5, 6, 2
RELATIVE = 1e-6


class RaggedSequences:
    """A regression on padded sequences of `lengths` 0 to LENGTH; padding does not count in the loss.

    All targets are on the same side of a new model's outputs. So gradients never cancel, and 1e-6 of one is meaningful.
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


class Crew(driver.Crew):
    """The product's coordinator, merge and workers. The caller chooses the order of events."""

    def __init__(self, task: RaggedSequences, *, rules: Rules, strict: bool) -> None:
        self.task, self.strict, self.planned_tokens = task, strict, rules.step_tokens
        model = task.model()
        self.params = dict(model.named_parameters())
        adamw = make_optimizer(AdamWSection(kind="adamw"), dtype=torch.float32)
        self.merging = Merger(model, recipe_of(adamw, lr_factor=1.0, clip_norm=1.0))
        self.workers: dict[str, tuple[nn.Module, ExactWorker, int]] = {}
        self.too_late: dict[int, Grant] = {}
        self.gradients: list[Tensor] = []
        self.weights: list[Tensor] = []
        super().__init__(machine(rules))

    def merge(self, action: events.Merge) -> None:
        if any(answer.contribution.tokens for answer in action.answers):
            reduced = self.merging.reduce(action.answers, planned_tokens=self.planned_tokens)
            self.gradients.append(flat(reduced.update))
            self.merging.step(reduced.update, norm=reduced.norm, version=action.version, steps=1)
        self.weights.append(flat(self.params))

    def contribution(self, grant: Grant, *, valid: bool) -> Contribution:
        """The worker's contribution, computed from the newest weights, even for a late lease."""
        model, sync, pass_sequences = self.workers[grant.worker]
        lease = Lease(lease_id=grant.lease_id, version=0, units=grant.units, planned_tokens=self.planned_tokens)
        section = TrainSection(batch_sequences=32, unit_sequences=UNIT, pass_sequences=pass_sequences)
        return answer(lease, task=self.task, model=model, sync=sync, weights=self.params, section=section)

    def comes(self, worker: str, *, speed: float, pass_sequences: int) -> None:
        if worker in self.machine.crew.members:
            self.lose(worker)
        model = self.task.model()
        self.workers[worker] = model, worker_half(model, strict=self.strict), pass_sequences
        self.join(worker, speed)

    def lose(self, worker: str) -> None:
        """Lose a worker. The answers to its leases can come later, too late."""
        self.too_late |= {id_: grant for id_, grant in self.leases.items() if grant.worker == worker}
        super().lose(worker)

    def comes_late(self, lease_id: int, *, seconds: float) -> None:
        self.leases[lease_id] = self.too_late.pop(lease_id)
        self.answer(lease_id, seconds=seconds)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors.values()])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


SPEEDS = st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0])
PASSES = st.sampled_from([0, 1, 3, 4])  # sequences; 0 is the whole lease at once
HAPPENINGS = st.tuples(st.sampled_from(["answer"] * 6 + ["late", "join", "leave"]), st.integers(0, 999), SPEEDS)


def play(crew: Crew, members: list[tuple[float, int]], happenings: list[tuple[str, int, float]]) -> None:
    """Let all members join, play the events, and then finish the run in order."""
    for index, (speed, pass_sequences) in enumerate(members):
        crew.comes(f"worker-{index}", speed=speed, pass_sequences=pass_sequences)
    for what, number, speed in happenings:
        if crew.machine.finished:
            return
        worker = f"worker-{number % len(members)}"
        if what == "answer" and crew.leases:
            crew.answer(sorted(crew.leases)[number % len(crew.leases)], seconds=1 / speed)
        elif what == "late" and crew.too_late:
            crew.comes_late(sorted(crew.too_late)[number % len(crew.too_late)], seconds=1 / speed)
        elif what == "join":
            crew.comes(worker, speed=speed, pass_sequences=number % 5)
        elif what == "leave":
            crew.lose(worker)
    if not crew.machine.crew.members:
        crew.comes("worker-0", speed=1.0, pass_sequences=0)
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
    """Workers of any speed join, leave and answer in any order, also too late, and have passes of any size."""
    torch.set_num_threads(1)
    task = RaggedSequences(lengths)
    rules = Rules(units_per_step=num_units, step_tokens=num_units * UNIT * LENGTH, num_steps=3)
    one = Crew(task, rules=rules, strict=strict)
    crew = Crew(task, rules=replace(rules, quorum=len(members)), strict=strict)
    play(one, [(1.0, 0)], [])
    play(crew, members, happenings)
    assert not crew.evicted
    assert len(one.weights) == len(crew.weights) == 3
    assert len(one.gradients) == len(crew.gradients)
    for ours, theirs in zip(crew.gradients + crew.weights, one.gradients + one.weights, strict=True):
        if strict:
            assert torch.equal(ours, theirs)
        else:
            assert relative(ours, theirs) <= RELATIVE
