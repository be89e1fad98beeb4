"""Measures how fast this machine trains a run's model: it runs the training loop with leases made for that."""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import nn

from cuadrilla.config import Config
from cuadrilla.link.base import Contribution, Lease, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.plan.predict import Workload
from cuadrilla.sync.kinds import exact, round_bytes, windows
from cuadrilla.sync.strategy import Recipe, trainable
from cuadrilla.train.setup import equip, make_task

LEASE_SECONDS, LEASE_UNITS, NUM_LEASES = 2.0, 4096, 3
"""Limits of a lease in seconds and in units, and the number of leases."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`used_bytes`: peak memory of a CUDA device; else memory of this process. `saved_bytes`: size of a checkpoint."""

    tokens_per_second: float
    device: str
    used_bytes: int
    saved_bytes: int
    num_weights: int
    total_tokens: int
    work: Workload


def measure(config: Config, folder: Path) -> Measured:
    """Measure a run whose paths are relative to `folder`, on its device, in about eight seconds. Passes shrink until
    they fit into memory, as in training. Raises TaskError, DataError, ConfigError, DeviceError, ResourceError.
    """
    threads, several = torch.get_num_threads(), len(config.engine.workers) > 1
    torch.set_num_threads(config.train.threads or (1 if several else threads))  # several workers have one thread each
    try:
        return _measure(config, folder)
    finally:
        torch.set_num_threads(threads)


def _measure(config: Config, folder: Path) -> Measured:
    equipment = equip(config, make_task(config, folder), strategy=exact())
    model, recipe, device, length = equipment.model, equipment.recipe, equipment.device, equipment.length
    leases = _Leases(weights=dict(equipment.strategy.merge(model, recipe).version(steps=1)), device=device)
    equipment.work(leases)
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    tokens_per_second = max(leases.rates) * length.unit_tokens  # the first seconds are slower
    return Measured(
        tokens_per_second=tokens_per_second,
        device=str(device),
        used_bytes=used,
        saved_bytes=sum(t.nbytes for t in windows(steps=2, bits=32).forms(model, recipe)[0].version.values()),
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        total_tokens=length.total_tokens,
        work=Workload(
            num_steps=length.num_steps,
            units_per_step=length.units_per_step,
            unit_tokens=length.unit_tokens,
            step_cost_tokens=_step_seconds(model, recipe, device) * tokens_per_second,
            exact_bytes=round_bytes(equipment.strategy, model, recipe),
            window_bytes=round_bytes(windows(steps=2), model, recipe),
        ),
    )


def _step_seconds(model: nn.Module, recipe: Recipe, device: torch.device) -> float:
    """Median time of an optimizer step, without the first one. The model must not be used for training afterwards."""
    optimizer, seconds = recipe.make_optimizer(trainable(model)), list[float]()
    for _ in range(1 + NUM_LEASES):
        for parameter in trainable(model).values():
            parameter.grad = torch.full_like(parameter, 1e-3)
        began = time.monotonic()
        optimizer.step(0.0)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[1:])


@dataclass(kw_only=True)
class _Leases:
    """A link that acts as coordinator: it sends the weights, a lease of one unit, and then leases of LEASE_SECONDS."""

    weights: Tensors
    device: torch.device
    units: int = 1
    first: int = 0
    began: float = 0.0
    rates: list[float] = field(default_factory=list)
    """Units per second of each answered lease."""

    def next_event(self) -> ToWorker:
        if not self.began:
            self.began = time.monotonic()
            return Version(version=0)
        if len(self.rates) > NUM_LEASES:
            return Stop(reason="")
        units, self.first = range(self.first, self.first + self.units), self.first + self.units
        self.began = time.monotonic()
        return Lease(lease_id=1, version=0, units=tuple(units), planned_tokens=1)

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            self.rates.append(self.units / (time.monotonic() - self.began))
            self.units = min(max(1, round(LEASE_SECONDS * self.rates[-1])), LEASE_UNITS)

    def interrupted(self) -> bool:
        return False

    def download(self, ref: TensorRef) -> Tensors:
        del ref
        return self.weights
