"""Windows by hand: what is merged, at which rate, and what is refused. The rest: `inproc/test_strategies.py`."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from cuadrilla.config import AdamWSection
from cuadrilla.errors import TaskError
from cuadrilla.link.base import Lease
from cuadrilla.sync.events import Answer
from cuadrilla.sync.strategy import Recipe, Sums
from cuadrilla.sync.windows import STATE, Windows, WindowsMerge
from cuadrilla.train.optim import make_optimizer
from tests.sessions import answer_of

ADAMW = make_optimizer(AdamWSection(kind="adamw", weight_decay=0.0), is_matrix=lambda *_: False, dtype=torch.float32)
STEPS = 4


def recipe(rates: list[int]) -> Recipe:
    """Notes the tokens at whose learning rates steps are made."""

    def factor(tokens: int) -> float:
        rates.append(tokens)
        return 1.0

    return Recipe(make_optimizer=ADAMW, lr_factor=factor, clip_norm=0.0, units_per_round=8, unit_tokens=10)


def lane(merge: WindowsMerge, *, gradient: float, tokens: int, rates: list[int]) -> Answer:
    """The answer to a lease of version 2 in which each step has so many tokens, each with this gradient."""
    model, sums = nn.ParameterDict({"w": torch.zeros(3)}), Sums()
    worker = Windows(steps_per_round=STEPS).worker(model, recipe(rates))
    worker.apply(merge.version())
    worker.begin(Lease(lease_id=1, version=2, units=(0,), planned_tokens=80))
    for _ in range(STEPS):
        (model["w"].sum() * gradient * tokens / 80).backward()
        sums.tokens += tokens
        worker.after_micro_step(sums)
        worker.local_step(sums)
    return answer_of(worker, tokens=sums.tokens)


def changed(answer: Answer, name: str, tensor: Tensor) -> Answer:
    return dataclasses.replace(
        answer, said=dataclasses.replace(answer.said, tensors={**answer.said.tensors, name: tensor})
    )


def test_weights_and_state_are_means_by_tokens_at_rates_of_the_runs_tokens() -> None:
    model, rates = nn.ParameterDict({"w": torch.zeros(3)}), list[int]()
    merge = Windows(steps_per_round=STEPS).merge(model, recipe([]))
    answers = [lane(merge, gradient=2.0, tokens=15, rates=rates), lane(merge, gradient=-2.0, tokens=5, rates=rates)]
    assert rates == 2 * [180, 200, 220, 240]
    merge.reduce(answers, planned_tokens=80)
    merge.step(norm=1.0, tokens=240, version=3)
    wanted = {name: 0.75 * t + 0.25 * answers[1].said.tensors[name] for name, t in answers[0].said.tensors.items()}
    assert torch.allclose(model["w"].detach(), wanted["w"])
    found = merge.version()
    for name in (f"{STATE}exp_avg.w", f"{STATE}exp_avg_sq.w"):
        assert torch.allclose(found[name], wanted[name])
        assert found[name].abs().min() > 0
    assert found[f"{STATE}step.w"] == STEPS


def test_a_state_that_is_no_number_is_found_though_the_weights_are() -> None:
    merge = Windows(steps_per_round=STEPS).merge(nn.ParameterDict({"w": torch.zeros(3)}), recipe([]))
    good = lane(merge, gradient=1.0, tokens=10, rates=[])
    bad = changed(good, f"{STATE}exp_avg.w", torch.tensor([0.0, float("nan"), 0.0]))
    assert merge.reduce([good, bad], planned_tokens=80).bad == (1,)
    assert merge.reduce([good, good], planned_tokens=80).bad == ()
    assert merge.is_plausible(good.said.tensors, num_units=1)
    negative = changed(good, f"{STATE}exp_avg_sq.w", torch.tensor([1.0, -1.0, 1.0]))
    assert not merge.is_plausible(negative.said.tensors, num_units=1)


def test_running_statistics_are_refused() -> None:
    with pytest.raises(TaskError, match="BatchNorm"):
        Windows(steps_per_round=STEPS).worker(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), recipe([]))
