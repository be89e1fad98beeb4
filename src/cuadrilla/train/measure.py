"""Measures how fast this machine trains a run's model: it runs the training loop with leases made for that."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from cuadrilla.config import Config
from cuadrilla.link.base import Contribution, Hello, Lease, Stop, Tensors, ToCoordinator, Version
from cuadrilla.link.inproc import InProcLink
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
    coordinator = _Coordinator(dict(equipment.strategy.merge(model, recipe).version(steps=1)), device=device)
    equipment.work(coordinator.link)
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    tokens_per_second = max(coordinator.rates) * length.unit_tokens  # the first seconds are slower
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


class _Coordinator:
    """Sends the weights to one worker in this process, a lease of one unit, and then leases of LEASE_SECONDS."""

    def __init__(self, weights: Tensors, *, device: torch.device) -> None:
        self.link, self._weights, self._device = InProcLink(self._receive), weights, device
        self.rates: list[float] = []
        """Units per second of each answered lease."""
        self._units = range(0)

    def _receive(self, message: ToCoordinator) -> None:
        match message:
            case Hello():
                self.link.inbox.put(Version(version=0, parameters=self._weights))
                self._lease(1)
            case Contribution():
                if self._device.type != "cpu":
                    torch.accelerator.synchronize(self._device)
                self.rates.append(len(self._units) / (time.monotonic() - self._began))
                if len(self.rates) > NUM_LEASES:
                    self.link.inbox.put(Stop(reason=""))
                else:
                    self._lease(min(max(1, round(LEASE_SECONDS * self.rates[-1])), LEASE_UNITS))

    def _lease(self, number: int) -> None:
        self._units, self._began = range(self._units.stop, self._units.stop + number), time.monotonic()
        self.link.inbox.put(Lease(lease_id=1, version=0, units=tuple(self._units), planned_tokens=1))
