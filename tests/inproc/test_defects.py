"""Defects of an earlier design for mixed crews, one test each: what went wrong there is the test's first sentence.

A Ray parameter server with CUDA, MPS and CPU actors, an unweighted mean and one batch size had them. Those with a test
elsewhere: the loss of one worker ends the run (`test_exact.test_a_worker_lost_at_any_phase_changes_nothing`), running
statistics that nobody shares (`test_recovery`), a batch size that is estimated and used by nobody
(`test_exact.test_out_of_memory_halves_the_pass_and_keeps_the_global_batch`), speeds that nobody measures
(`test_coordinator.test_shares_follow_what_was_measured_not_what_is_claimed`), strangers who may call
(`test_link_connections.test_tls_without_a_certificate_is_refused`).
"""

import copy
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cuadrilla.config import EvaluateSection, TrainSection
from cuadrilla.engines.bundle import offer
from cuadrilla.errors import DeviceError
from cuadrilla.link.base import Contribution, Hello, Lease, Version
from cuadrilla.link.inproc import InProcServer
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.runfile import load_dumped
from cuadrilla.sync.exact import ExactMerge
from cuadrilla.train.evaluate import evaluate
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.precision import INITIAL_FP16_SCALE, Precision, choose_device
from tests.runs import execute, final_sha256, metrics, prepare, workers
from tests.sessions import FP32, answer, worker_half
from tests.tasks import NUM_EXAMPLES, Examples, RaggedRegression

NUM_UNITS, UNIT = 6, 4


# -- where workers run, and how many ----------------------------------------------------------------------------------


def test_a_worker_has_the_device_of_its_own_machine_not_of_the_coordinators(tmp_path: Path) -> None:
    """Kinds of workers were decided from the driver's own hardware: a Mac as driver gave an NVIDIA PC no work."""
    (tmp_path / "task.py").touch()
    sets = ('engine.kind="crew"', "engine.workers=[1.0, 1.0]", 'train.device="auto"', 'train.precision="auto"')
    context = prepare(tmp_path, RaggedRegression(), *sets)
    offered = load_dumped(offer(context.config, tmp_path).config).train
    assert (offered.device, offered.precision) == ("auto", "auto")  # what the coordinator chose is for itself

    server = InProcServer(context.coordination.receive)
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
    assert sorted(leased) == list(range(context.length.units_per_round))
    context.store.close()


def test_a_worker_never_computes_on_another_device_than_the_one_asked_for(tmp_path: Path) -> None:
    """A worker for MPS was pinned to no node and could land where there is none."""
    available = {"mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available()}
    missing = next(kind for kind, there in available.items() if not there)  # no machine has both
    with pytest.raises(DeviceError, match=missing):
        execute(tmp_path, RaggedRegression(), f'train.device="{missing}"')
    assert not metrics(tmp_path)


def test_there_are_as_many_workers_as_the_run_says(tmp_path: Path) -> None:
    """One card with more than 8 GB was given two workers, later clamped without a word."""
    for name, sets, expected in (("default", (), 1), ("three", (workers([1.0, 1.0, 1.0]),), 3)):
        execute(tmp_path / name, RaggedRegression(), *sets)
        joined = [row["worker"] for row in read_jsonl(RunDir(tmp_path / name).events) if row["event"] == "joined"]
        assert sorted(joined) == [f"worker-{index}" for index in range(1, expected + 1)]


# -- what each worker gets ---------------------------------------------------------------------------------------------


class Watched(RaggedRegression):
    """Remembers which training examples were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[int] = Counter()
        self.lock = threading.Lock()

    def data(self, split: Literal["train", "val"]) -> Examples:
        return WatchedExamples(self) if split == "train" else super().data(split)


class WatchedExamples(Examples):
    def __init__(self, task: Watched) -> None:
        super().__init__(0)
        self.task = task

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        with self.task.lock:
            self.task.read[index] += 1
        return super().__getitem__(index)


def test_no_two_workers_compute_the_same_example_of_an_epoch(tmp_path: Path) -> None:
    """Data were not divided: every worker called the user's get_batch() for itself."""
    task, num_steps = Watched(), 14
    execute(tmp_path, task, workers([1.0, 0.5, 0.25]), f"train.steps={num_steps}")
    assert max(row["workers"] for row in metrics(tmp_path)) == 3
    assert task.read.total() == 72 * num_steps  # an epoch and a little of the next
    assert set(task.read) == set(range(NUM_EXAMPLES))
    assert sum(times - 1 for times in task.read.values()) == 72 * num_steps - NUM_EXAMPLES
    assert max(task.read.values()) == 2


# -- what is merged ----------------------------------------------------------------------------------------------------


class NoOptimizer:
    """The merged gradient is looked at, never used."""

    def step(self, factor: float) -> None:
        raise AssertionError

    def state_tensors(self) -> dict[str, Tensor]:
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


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


def merged(model: nn.Module, *contributions: Contribution) -> Tensor:
    merge = ExactMerge(
        copy.deepcopy(model), make_optimizer=lambda _: NoOptimizer(), lr_factor=float, clip_norm=0, strict=False
    )
    merge.reduce(contributions, planned_tokens=NUM_UNITS * UNIT)
    return flat(merge.update())


def test_a_ragged_batch_weighs_by_its_tokens() -> None:
    """A mean of means weighs a ragged batch wrongly: gradients were averaged without regard to their tokens."""
    task, model = RaggedRegression(), RaggedRegression().model()
    one = merged(model, contribution(task, model, *range(NUM_UNITS)))
    shares = [contribution(task, model, 0), contribution(task, model, *range(1, NUM_UNITS))]
    assert len({share.tokens for share in shares}) == 2
    assert float((merged(model, *shares) - one).norm() / one.norm()) <= 1e-6
    means = [flat(share.tensors) * NUM_UNITS * UNIT / share.tokens for share in shares]
    assert float(((means[0] + means[1]) / 2 - one).norm() / one.norm()) > 0.05  # and these data would show it


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
    found = [evaluate(task, model, section=EvaluateSection(), device=device, precision=FP32) for _ in range(2)]
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
