"""A worker's sessions, one lease long: the product's loop in the caller's thread, told what to do beforehand."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cuadrilla.config import RunSection, TrainSection
from cuadrilla.link.base import Contribution, Lease
from cuadrilla.model.task import Task
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.train.loop import WorkerSettings, train
from cuadrilla.train.precision import Precision
from cuadrilla.train.referee import OneLease

SOME_LEASE = Lease(lease_id=1, version=0, units=(0,), planned_tokens=1)
"""For what does not depend on which it is."""
FP32 = Precision(dtype=torch.float32, reason="test")


def worker_half(model: nn.Module, *, strict: bool = False) -> ExactWorker:
    return ExactWorker(model, strict=strict)


def answer(
    lease: Lease,
    *,
    task: Task,
    model: nn.Module,
    sync: ExactWorker,
    weights: Mapping[str, Tensor],
    section: TrainSection,
    precision: Precision = FP32,
) -> Contribution:
    """What a worker says to a lease of the version `weights`; its tensors are not copied. `sync` is the model's."""
    link = OneLease(weights, lease)
    settings = WorkerSettings(run=RunSection(), train=section, device=torch.device("cpu"), precision=precision)
    train(link, task=task, model=model, sync=sync, worker=settings)
    assert link.answer is not None
    return link.answer
