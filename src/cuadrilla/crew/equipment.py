"""What a worker computes with in a process that has no coordinator: loaded once, kept over sessions."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cuadrilla.config import Config
from cuadrilla.host.facts import read_facts
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.link.base import Link, Stop
from cuadrilla.link.wire import Layout
from cuadrilla.model.task import Task
from cuadrilla.sync.choose import make_strategy
from cuadrilla.sync.statistics import refuse_private_buffers
from cuadrilla.sync.strategy import Recipe, Strategy
from cuadrilla.train.kernels import choose_kernels
from cuadrilla.train.loop import WorkerSettings, train
from cuadrilla.train.precision import choose_device, choose_precision
from cuadrilla.train.setup import compile_blocks, make_model_to_train, make_recipe, make_task, measure_length

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """For one worker."""

    config: Config
    task: Task
    model: nn.Module
    settings: WorkerSettings
    strategy: Strategy
    recipe: Recipe

    @property
    def parameters(self) -> Layout:
        """Of a version, as it arrives."""
        return Layout.of(self.strategy.version_like(self.model, self.recipe))

    def work(self, link: Link) -> Stop:
        """One session, from Hello to Stop. Raises LinkError when it breaks."""
        sync = self.strategy.worker(self.model, self.recipe)
        return train(link, task=self.task, model=self.model, sync=sync, worker=self.settings)


def set_threads(config: Config, *, cores: int) -> None:
    """Of one worker in this process. Strict bits depend on it."""
    torch.set_num_threads(config.train.threads or (1 if config.sync.strict else cores))
    keep_freed_memory()


def num_cores() -> int:
    """Whole cores that this process may use."""
    return max(1, int(read_facts().usable_cores or 1))


def equip(config: Config, folder: Path, *, device: str = "", cores: int = 0, speed: float = 1.0) -> Equipment:
    """For a run whose paths are relative to `folder`. `device` "": what the run says; `cores` 0: all of this process.

    Raises TaskError, DataError, ConfigError, DeviceError.
    """
    set_threads(config, cores=cores or num_cores())
    task = make_task(config, folder)
    place = choose_device(device or config.train.device)
    model = make_model_to_train(config, task)
    model.to(place)
    refuse_private_buffers(model)
    if config.train.compile:
        compile_blocks(model)
    precision = choose_precision(config.train.precision, device=place)
    choice = choose_kernels(model, device=place, dtype=precision.dtype, strict=config.sync.strict)
    if choice.reason:
        log.info("kernels: %s", choice)
    strategy = make_strategy(config.sync)
    length = measure_length(config, task)
    return Equipment(
        config=config,
        task=task,
        model=model,
        settings=WorkerSettings(
            run=config.run,
            train=config.train,
            device=place,
            precision=precision,
            speed_hint=speed,
            pass_tokens=choice.pass_tokens,
        ),
        strategy=strategy,
        recipe=make_recipe(config, task=task, length=length, precision=precision),
    )
