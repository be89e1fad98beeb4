"""What a worker computes with in a process that has no coordinator: loaded once, kept over sessions."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cuadrilla.config import Config
from cuadrilla.engines.local import num_cores
from cuadrilla.home import Home
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
    """`parameters`: of a version, as it arrives."""

    config: Config
    task: Task
    model: nn.Module
    settings: WorkerSettings
    strategy: Strategy
    recipe: Recipe
    parameters: Layout

    def work(self, link: Link) -> Stop:
        """One session, from Hello to Stop. Raises LinkError when it breaks."""
        sync = self.strategy.worker(self.model, self.recipe)
        return train(link, task=self.task, model=self.model, sync=sync, worker=self.settings)


def equip(config: Config, folder: Path, *, device: str = "", cores: int = 0, speed: float = 1.0) -> Equipment:
    """For a run whose paths are relative to `folder`. `device` "": what the run says; `cores` 0: all of this process.

    Raises TaskError, DataError, ConfigError, DeviceError.
    """
    threads = config.train.threads or (
        1 if config.sync.strict else cores or num_cores()
    )  # as `run_local`: strict bits depend on it
    torch.set_num_threads(threads)
    keep_freed_memory()
    task = make_task(config, folder)
    place = choose_device(device or config.train.device)
    model = make_model_to_train(config, task)
    if not config.train.shard:  # it would not fit
        model.to(place)
    refuse_private_buffers(model)
    if config.train.compile:
        compile_blocks(model)
    precision = choose_precision(config.train.precision, device=place)
    home = Home.of_user().path
    choice = choose_kernels(model, device=place, dtype=precision.dtype, strict=config.sync.strict, home=home)
    log.info("kernels: %s", choice)
    strategy = make_strategy(config.sync)
    length = measure_length(config.train, task)
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
        parameters=Layout.of(strategy.version_like(model)),
    )
