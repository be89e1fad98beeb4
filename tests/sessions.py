"""A worker's sessions of one lease: the product's loop in the caller's thread, over a link with prepared messages."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from cuadrilla.config import RunSection, TrainSection
from cuadrilla.link.base import Contribution, Lease, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.model.task import Task
from cuadrilla.sync.events import Answer, Grant
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.sync.strategy import Parameters, Recipe, Stepper
from cuadrilla.train.loop import WorkerSettings, train
from cuadrilla.train.precision import Precision

SOME_LEASE = Lease(lease_id=1, version=0, units=(0,), planned_tokens=1)
"""For tests in which any lease will do."""
FP32 = Precision(dtype=torch.float32, reason="test")


class Led:
    """A link that gives these events to a worker, and keeps the worker's contributions."""

    def __init__(self, *events: ToWorker) -> None:
        self._events = list(events)
        self.answers: list[Contribution] = []

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            self.answers.append(replace(message, tensors=dict(message.tensors)))

    def next_event(self) -> ToWorker:
        return self._events.pop(0)

    def interrupted(self) -> bool:
        return False

    def download(self, ref: TensorRef) -> Tensors:
        return ref  # type: ignore[return-value]


def worker_half(model: nn.Module, *, strict: bool = False) -> ExactWorker:
    return ExactWorker(model, strict=strict)


class ConstantGradient:
    """An optimizer whose steps are easily computed by hand: θ ← θ − factor · gradient."""

    adaptive: frozenset[str] = frozenset()

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params

    def start(self) -> None:
        """Nothing to do: it has no state."""

    @torch.no_grad()
    def step(self, factor: float, *, squares: Mapping[str, torch.Tensor] | None = None) -> None:
        assert squares is None or not squares
        for parameter in self.params.values():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=factor)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert not tensors


def recipe_of(
    make_optimizer: Callable[[Parameters], Stepper], *, lr_factor: float = 0.5, clip_norm: float = 0.0
) -> Recipe:
    """A recipe with a constant learning rate."""
    return Recipe(make_optimizer=make_optimizer, lr_factor=lambda _step: lr_factor, clip_norm=clip_norm)


def answer_of(worker: ExactWorker, *, tokens: int) -> Answer:
    """The answer, as the coordinator holds it, with the contribution that this worker has ready."""
    said = Contribution(lease_id=1, tokens=tokens, loss_sum=0.0, tensors=worker.contribute())
    return Answer(grant=Grant(lease_id=1, worker="ana", units=(0,)), contribution=said)


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
    """The contribution of a worker to a lease that starts from `weights`, which are not copied. `sync`: for `model`."""
    link = Led(Version(version=lease.version, parameters=weights), lease, Stop(reason=""))
    settings = WorkerSettings(run=RunSection(), train=section, device=torch.device("cpu"), precision=precision)
    train(link, task=task, model=model, sync=sync, worker=settings)
    return link.answers[0]
