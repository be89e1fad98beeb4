"""What a worker computes with in a process that has no coordinator: loaded once, kept over sessions."""

import logging
from pathlib import Path

import torch

from cuadrilla.config import Config
from cuadrilla.host.facts import read_facts
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.sync.statistics import refuse_private_buffers
from cuadrilla.train import setup
from cuadrilla.train.setup import Equipment, compile_blocks, make_model_to_train, make_task

log = logging.getLogger(__name__)


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
    equipment = setup.equip(config, task, make_model_to_train(config, task), device=device, speed=speed)
    refuse_private_buffers(equipment.model)
    if config.train.compile:
        compile_blocks(equipment.model)
    return equipment
