"""Defects of an earlier design for mixed crews, one test each: what went wrong there is the test's first sentence.

A Ray parameter server with CUDA, MPS and CPU actors, an unweighted mean and one batch size had them. Those with a test
elsewhere: the loss of one worker ends the run (`test_strategies.test_a_worker_lost_at_any_phase_changes_nothing`),
running statistics that nobody shares (`test_statistics`), a batch size that is estimated and used by nobody
(`test_exact.test_out_of_memory_halves_the_pass_and_keeps_the_global_batch`), a mean of means
(`test_exactness.test_any_split_raggedness_and_order_gives_the_result_of_one_worker`), speeds that nobody measures
(`test_coordinator.test_shares_follow_what_was_measured_not_what_is_claimed`), data that are not divided
(`test_coordinator.test_every_unit_is_counted_exactly_once_whatever_happens`,
`test_order.test_each_epoch_is_a_permutation`), strangers who may call (`test_link_callers.test_who_may_call_what`).
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from cuadrilla.config import TrainSection
from cuadrilla.crew.bundle import offer
from cuadrilla.errors import DeviceError
from cuadrilla.link.base import Contribution, Hello, Lease, Version
from cuadrilla.runfile import load_dumped
from cuadrilla.train.evaluate import evaluate
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.precision import INITIAL_FP16_SCALE, Precision, choose_device
from tests.runs import execute, final_sha256, metrics, prepare
from tests.sessions import FP32, answer, worker_half
from tests.tasks import Examples, RaggedRegression
from tests.transports import Ends

NUM_UNITS, UNIT = 6, 4


# -- where workers run, and how many ----------------------------------------------------------------------------------


def test_a_worker_has_the_device_of_its_own_machine_not_of_the_coordinators(tmp_path: Path) -> None:
    """Kinds of workers were decided from the driver's own hardware: a Mac as driver gave an NVIDIA PC no work."""
    (tmp_path / "task.py").touch()
    sets = ('engine.kind="crew"', "engine.workers=[1.0, 1.0]", 'train.device="auto"', 'train.precision="auto"')
    context = prepare(tmp_path, RaggedRegression(), *sets)
    offered = load_dumped(offer(context.config, tmp_path).config).train
    assert (offered.device, offered.precision) == ("auto", "auto")  # what the coordinator chose is for itself

    server = Ends(context.coordination.receive)
    context.coordination.open(server.send)
    links = {device: server.connect(device) for device in ("cuda", "mps")}
    for device, link in links.items():
        link.call(
            Hello(speed_hint=1.0, environment={**code_fingerprint(context.task, context.model), "device": device})
        )
    leased: list[int] = []
    for link in links.values():
        assert isinstance(link.next_event(), Version)
        lease = link.next_event()
        assert isinstance(lease, Lease)
        leased += lease.units
    assert sorted(leased) == list(range(context.length.units_per_step))
    context.store.close()


def test_a_worker_never_computes_on_another_device_than_the_one_asked_for(tmp_path: Path) -> None:
    """A worker for MPS was pinned to no node and could land where there is none."""
    available = {"mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available()}
    missing = next(kind for kind, there in available.items() if not there)  # no machine has both
    with pytest.raises(DeviceError, match=missing):
        execute(tmp_path, RaggedRegression(), f'train.device="{missing}"')
    assert not metrics(tmp_path)


# -- what each worker gets ---------------------------------------------------------------------------------------------


def lease(*units: int) -> Lease:
    return Lease(lease_id=1, version=0, units=units, planned_tokens=NUM_UNITS * UNIT)


def work(
    task: RaggedRegression,
    model: nn.Module,
    *units: int,
    weights: Mapping[str, Tensor],
    precision: Precision,
) -> Contribution:
    sync, section = worker_half(model), TrainSection(batch_sequences=32, unit_sequences=UNIT)
    return answer(
        lease(*units), task=task, model=model, sync=sync, weights=weights, section=section, precision=precision
    )


def contribution(task: RaggedRegression, model: nn.Module, *units: int, precision: Precision = FP32) -> Contribution:
    """A worker's answer, its model a copy of `model`."""
    return work(task, copy.deepcopy(model), *units, weights=dict(model.named_parameters()), precision=precision)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


# -- half precision ----------------------------------------------------------------------------------------------------

FP16 = Precision(dtype=torch.float16, reason="test", loss_scale=INITIAL_FP16_SCALE)


def test_a_worker_in_half_precision_moves_no_weights() -> None:
    """With AMP each worker stepped a throw-away SGD(lr=0.01), and computed on from weights of its own."""
    task, model = RaggedRegression(), RaggedRegression().model()
    mine, weights = copy.deepcopy(model), dict(model.named_parameters())
    work(task, mine, 0, 1, weights=weights, precision=FP16)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in mine.named_parameters())


class Loud(RaggedRegression):
    """Gradients that overflow fp16 at the first loss scales."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        total, count = super().loss(model, batch)
        return total * 1000, count


def test_an_overflow_in_half_precision_is_computed_again_and_never_sent() -> None:
    """With AMP infinite gradients were shipped to the parameter server."""
    task, model = Loud(), Loud().model()
    exact = contribution(task, model, 0, 1)
    passes_of_fp32, task.num_losses = task.num_losses, 0
    half = contribution(task, model, 0, 1, precision=FP16)
    assert task.num_losses > passes_of_fp32  # it did overflow
    assert half.valid
    assert half.tokens == exact.tokens
    assert flat(half.tensors).isfinite().all()
    assert float((flat(half.tensors) - flat(exact.tensors)).norm() / flat(exact.tensors).norm()) < 0.02


# -- evaluation and resuming -------------------------------------------------------------------------------------------


class Stateful(RaggedRegression):
    """Whatever an evaluation could leave behind: running statistics, dropout. Remembers which splits were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.splits: list[str] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def data(self, split: Literal["train", "val"]) -> Examples:
        self.splits.append(split)
        return super().data(split)


def test_evaluating_trains_nothing_and_reads_held_out_data_only() -> None:
    """evaluate() called train_step() on training data."""
    task = Stateful()
    model, device = task.model(), choose_device("cpu")
    before: dict[str, Any] = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    found = [evaluate(task, model, sequences=64, device=device, precision=FP32) for _ in range(2)]
    assert task.splits == ["val", "val"]
    assert found[0] == found[1]  # no dropout
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training


def test_a_resumed_run_continues_its_data_and_its_random_numbers(tmp_path: Path) -> None:
    """Checkpoints held neither the place in the data nor the random numbers' state."""
    execute(tmp_path / "whole", RaggedRegression(dropout=0.3))
    execute(tmp_path / "parts", RaggedRegression(dropout=0.3), stop_at=3)
    execute(tmp_path / "parts", RaggedRegression(dropout=0.3))
    assert final_sha256(tmp_path / "parts") == final_sha256(tmp_path / "whole")
    execute(tmp_path / "other", RaggedRegression(dropout=0.31))
    assert final_sha256(tmp_path / "other") != final_sha256(tmp_path / "whole")  # dropout does decide the weights
