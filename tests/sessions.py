"""A worker's sessions, one lease long: the product's loop in the caller's thread, told what to do beforehand."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cuadrilla.config import RunSection, TrainSection
from cuadrilla.link.base import Contribute, Lease, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.model.task import Task
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.train.loop import WorkerSettings, train
from cuadrilla.train.precision import Precision

FP32 = Precision(dtype=torch.float32, reason="test")


class Script:
    """A link on which everything the coordinator will say waits already. `answers`: the contributions so far."""

    def __init__(self, *events: ToWorker) -> None:
        self._events = list(events)
        self.answers: list[Contribute] = []

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribute):
            self.answers.append(message)

    def next_event(self) -> ToWorker:
        return self._events.pop(0)

    def interrupted(self) -> bool:
        return False  # the Stop at the end asks for no haste

    def upload(self, tensors: Tensors) -> TensorRef:
        return tensors

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, Mapping)
        return ref

    def close(self) -> None: ...


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
) -> Contribute:
    """What a worker says to a lease of the version `weights`; its tensors are not copied. `sync` is the model's."""
    script = Script(Version(version=lease.version, parameters=weights), lease, Stop(reason="done"))
    settings = WorkerSettings(run=RunSection(), train=section, device=torch.device("cpu"), precision=precision)
    train(script, task=task, model=model, sync=sync, worker=settings)
    return script.answers[0]
