"""Windows, computed by hand: the merge, the learning rates, refused answers. The rest: `inproc/test_strategies.py`."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cuadrilla.config import AdamWSection, SGDSection
from cuadrilla.errors import TaskError
from cuadrilla.link.base import Lease
from cuadrilla.sync.events import Answer
from cuadrilla.sync.kinds import windows
from cuadrilla.sync.merge import Merger
from cuadrilla.sync.strategy import SQUARE, STATE, Parameters, Recipe, Stepper, Sums
from cuadrilla.train.optim import make_optimizer
from tests.sessions import answer_of

MOMENTUM = make_optimizer(SGDSection(kind="sgd"), dtype=torch.float32)
ADAMW = make_optimizer(AdamWSection(kind="adamw", weight_decay=0.0), dtype=torch.float32)
STEPS = 4


def recipe(rates: list[float], optimizer: Callable[[Parameters], Stepper] = MOMENTUM) -> Recipe:
    """A recipe that appends to `rates` each step whose learning rate is asked for."""

    def factor(step: float) -> float:
        rates.append(step)
        return 1.0

    return Recipe(make_optimizer=optimizer, lr_factor=factor, clip_norm=0.0)


def lane(
    merge: Merger,
    *,
    gradient: float,
    tokens: int,
    rates: list[float],
    optimizer: Callable[[Parameters], Stepper] = MOMENTUM,
    whole: bool = False,
    parts: int = 1,
) -> Answer:
    """The answer to a lease at version 8. Each step has `tokens` tokens, and each token has this gradient."""
    model, sums = nn.ParameterDict({"w": torch.zeros(merge.version(steps=STEPS)["w"].shape)}), Sums()
    worker = windows(steps=STEPS, bits=32).worker(model, recipe(rates, optimizer))
    worker.apply(merge.version(steps=STEPS))
    lease = Lease(lease_id=1, version=8, units=(0,), planned_tokens=80, steps=STEPS, parts=parts, whole=whole)
    worker.begin(lease)
    for _ in range(STEPS):
        (model["w"].sum() * gradient * tokens / 80).backward()
        sums.tokens += tokens
        worker.after_micro_step(sums)
        worker.local_step(sums)
    return answer_of(worker, tokens=sums.tokens)


def changed(answer: Answer, name: str, tensor: Tensor) -> Answer:
    return dataclasses.replace(
        answer,
        contribution=dataclasses.replace(answer.contribution, tensors={**answer.contribution.tensors, name: tensor}),
    )


@pytest.mark.parametrize("shape", [(3,), ()], ids=["a vector", "a scalar"])
def test_weights_and_state_are_means_by_tokens_at_the_rates_of_the_runs_steps(shape: tuple[int, ...]) -> None:
    model, rates = nn.ParameterDict({"w": torch.zeros(shape)}), list[float]()
    merge = windows(steps=STEPS, bits=32).merge(model, recipe([]))
    answers = [lane(merge, gradient=2.0, tokens=15, rates=rates), lane(merge, gradient=-2.0, tokens=5, rates=rates)]
    assert rates == 2 * [9, 10, 11, 12]
    reduced = merge.reduce(answers, planned_tokens=80)
    merge.step(reduced.update, norm=1.0, version=12, steps=STEPS)
    wanted = {
        name: 0.75 * t + 0.25 * answers[1].contribution.tensors[name]
        for name, t in answers[0].contribution.tensors.items()
    }
    assert torch.allclose(model["w"].detach(), wanted["w"])
    momentum = f"{STATE}momentum_buffer.w"
    assert torch.allclose(merge.version(steps=STEPS)[momentum], wanted[momentum])
    assert wanted[momentum].abs().min() > 0


def test_adaptive_parameters_take_the_windows_steps_with_the_mean_gradient() -> None:
    """Both lanes have the same gradient, so the result is AdamW's steps with it; only the squares are of the parts."""
    model, rates = nn.ParameterDict({"w": torch.zeros(3)}), list[float]()
    merge = windows(steps=STEPS, bits=32).merge(model, recipe(rates, ADAMW))
    answers = [lane(merge, gradient=2.0, tokens=tokens, rates=[], optimizer=ADAMW) for tokens in (15, 5)]
    reduced = merge.reduce(answers, planned_tokens=80)
    merge.step(reduced.update, norm=1.0, version=12, steps=STEPS)
    assert rates == [9, 10, 11, 12, 12]  # the last one is reported for the window
    weight, mean, square, section = 0.0, 0.0, 0.0, AdamWSection(kind="adamw")
    for step in range(1, STEPS + 1):
        mean += (1 - section.beta1) * (2.0 - mean)
        square += (1 - section.beta2) * ((0.75 * 2.0) ** 2 + (0.25 * 2.0) ** 2 - square)
        root = (square / (1 - section.beta2**step)) ** 0.5
        weight -= section.lr * mean / (1 - section.beta1**step) / root
    assert model["w"].tolist() == pytest.approx([weight] * 3)
    found = merge.version(steps=STEPS)
    assert found[f"{STATE}exp_avg.w"].tolist() == pytest.approx([mean] * 3)
    assert found[f"{STATE}exp_avg_sq.w"].tolist() == pytest.approx([square] * 3)
    assert found[f"{STATE}step.w"] == STEPS


def test_one_lane_with_adamw_is_adamw_alone() -> None:
    model, alone = (nn.ParameterDict({"w": torch.zeros(3)}) for _ in range(2))
    merge = windows(steps=STEPS, bits=32).merge(model, recipe([], ADAMW))
    reduced = merge.reduce([lane(merge, gradient=3.0, tokens=20, rates=[], optimizer=ADAMW)], planned_tokens=80)
    merge.step(reduced.update, norm=1.0, version=12, steps=STEPS)
    optimizer = ADAMW(alone)
    for _ in range(STEPS):
        alone["w"].grad = torch.full((3,), 3.0)
        optimizer.step(1.0)
    assert torch.allclose(model["w"], alone["w"])


def test_a_lane_that_is_the_whole_window_is_taken_over_with_its_own_steps() -> None:
    model = nn.ParameterDict({"w": torch.zeros(3)})
    merge = windows(steps=STEPS, bits=32).merge(model, recipe([], ADAMW))
    answer = lane(merge, gradient=2.0, tokens=20, rates=[], optimizer=ADAMW, whole=True)
    assert merge.is_plausible(answer.contribution.tensors, num_units=1, steps=STEPS, whole=True)
    reduced = merge.reduce([answer], planned_tokens=80)
    merge.step(reduced.update, norm=1.0, version=12, steps=STEPS)
    said, version = answer.contribution.tensors, merge.version(steps=STEPS)
    assert torch.equal(model["w"].detach(), said["w"])
    assert said["w"].abs().min() > 0
    assert all(torch.equal(version[name], said[name]) for name in said if name.startswith(STATE))


def test_smaller_steps_have_the_rates_between_the_runs_steps() -> None:
    merge, rates = windows(steps=2, bits=32).merge(nn.ParameterDict({"w": torch.zeros(3)}), recipe([])), list[float]()
    lane(merge, gradient=2.0, tokens=20, rates=rates, whole=True, parts=2)
    assert rates == [8.5, 9.0, 9.5, 10.0]


def test_one_of_several_that_claims_to_be_the_whole_window_is_not_plausible() -> None:
    merge = windows(steps=STEPS, bits=32).merge(nn.ParameterDict({"w": torch.zeros(3)}), recipe([], ADAMW))
    said = [
        lane(merge, gradient=2.0, tokens=10, rates=[], optimizer=ADAMW, whole=whole).contribution.tensors
        for whole in (False, True)
    ]
    assert [merge.is_plausible(each, num_units=1, steps=STEPS, whole=False) for each in said] == [True, False]


def test_a_state_that_is_no_number_is_found_though_the_weights_are() -> None:
    merge = windows(steps=STEPS, bits=32).merge(nn.ParameterDict({"w": torch.zeros(3)}), recipe([]))
    good = lane(merge, gradient=1.0, tokens=10, rates=[])
    bad = changed(good, f"{STATE}momentum_buffer.w", torch.tensor([0.0, float("nan"), 0.0]))
    assert merge.reduce([good, bad], planned_tokens=80).bad == (1,)
    assert merge.reduce([good, good], planned_tokens=80).bad == ()


def test_a_negative_square_is_not_plausible() -> None:
    merge = windows(steps=STEPS, bits=32).merge(nn.ParameterDict({"w": torch.zeros(3)}), recipe([], ADAMW))
    good = lane(merge, gradient=1.0, tokens=10, rates=[], optimizer=ADAMW)
    assert merge.is_plausible(good.contribution.tensors, num_units=1, steps=STEPS, whole=False)
    negative = changed(good, f"{SQUARE}w", torch.tensor([1.0, -1.0, 1.0]))
    assert not merge.is_plausible(negative.contribution.tensors, num_units=1, steps=STEPS, whole=False)


def test_running_statistics_are_refused() -> None:
    with pytest.raises(TaskError, match="BatchNorm"):
        windows(steps=STEPS, bits=32).worker(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), recipe([]))
