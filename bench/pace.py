"""A worker of `bench.throughput` whose units take as long as the bench says."""

import time
from typing import Any

import torch

from cuadrilla.config import Config
from cuadrilla.link.base import (
    Contribution,
    Lease,
    Link,
    Progress,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.model.task import Task
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.train.loop import WorkerSettings, train
from cuadrilla.train.precision import choose_precision

CPU = torch.device("cpu")
Answer = dict[str, Any]


class Pace:
    """A machine that needs `unit_seconds` for a unit. Counts units and their real seconds while `counting`."""

    def __init__(self, unit_seconds: float) -> None:
        self._unit_seconds = unit_seconds
        self._began = 0.0
        self.counting = False
        self.units = self.late = 0
        self.seconds = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def rest(self, *, ahead: float = 0.0) -> None:
        """Sleep until the unit's time is over, or `ahead` seconds before it."""
        time.sleep(max(0.0, self._began + self._unit_seconds - ahead - time.monotonic()))

    def end(self) -> None:
        late = time.monotonic() > self._began + self._unit_seconds
        self.rest()
        if self.counting:
            self.units += 1
            self.late += late
            self.seconds += time.monotonic() - self._began

    def answer(self) -> Answer:
        """`late`: units whose arithmetic alone took longer than the machine should need."""
        return {"units": self.units, "seconds": self.seconds, "late": self.late}


class PacedLink:
    """Wraps a link: passes are paced, transfers are timed. Counts from version `first` on."""

    def __init__(self, link: Link, *, pace: Pace, first: int) -> None:
        self._link = link
        self._pace = pace
        self._first = first
        self.transfer_seconds: list[float] = []

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Progress):
            self._pace.end()
        began = time.monotonic()
        self._link.call(message)
        if isinstance(message, Contribution) and self._pace.counting:
            self.transfer_seconds[-1] += time.monotonic() - began
        self._pace.begin()

    def next_event(self) -> ToWorker:
        event = self._link.next_event()
        if isinstance(event, Version):
            self._pace.counting = event.version >= self._first
        if isinstance(event, Lease):
            self._pace.begin()
        return event

    def interrupted(self) -> bool:
        return self._link.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        began = time.monotonic()
        tensors = self._link.download(ref)
        if self._pace.counting:
            self.transfer_seconds.append(time.monotonic() - began)
        return tensors

    def answer(self) -> Answer:
        return {**self._pace.answer(), "transfer_seconds": self.transfer_seconds}

    def close(self) -> None:
        self._link.close()


def work(link: PacedLink, config: Config, *, task: Task, model: torch.nn.Module) -> Answer:
    """The product's loop on a paced link, and what that measured."""
    settings = WorkerSettings(
        run=config.run, train=config.train, device=CPU, precision=choose_precision("fp32", device=CPU)
    )
    try:
        train(link, task=task, model=model, sync=ExactWorker(model, strict=False), worker=settings)
    finally:
        link.close()
    return link.answer()
