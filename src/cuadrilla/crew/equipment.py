"""Devices, threads and loaded parts of this machine's workers. Devices are probed only if there is a choice. A worker
without a coordinator in its process loads model and data once, and keeps them over sessions."""

import os
from functools import cache
from pathlib import Path

import torch

from cuadrilla.config import Config
from cuadrilla.host.devices import probe_devices
from cuadrilla.host.facts import read_facts
from cuadrilla.host.process import keep_freed_memory
from cuadrilla.plan.devices import AUTO, DeviceChoice, Use, choose_devices
from cuadrilla.sync.statistics import refuse_private_buffers
from cuadrilla.train import setup
from cuadrilla.train.precision import choose_device
from cuadrilla.train.setup import Equipment, compile_blocks, make_task

_devices = cache(probe_devices)


def set_threads(config: Config, *, cores: int) -> None:
    """Set the threads of one worker in this process. In strict mode the bits depend on their number."""
    torch.set_num_threads(config.train.threads or (1 if config.sync.strict else cores))
    keep_freed_memory()


def num_cores() -> int:
    """Whole cores that this process may use."""
    return max(1, int(read_facts().cores))


def equip_worker(config: Config, folder: Path, *, device: str = "", cores: int = 0, speed: float = 1.0) -> Equipment:
    """Load a run whose paths are relative to `folder`. `device` "": as the run says. `cores` 0: all of this process.

    Raises TaskError, DataError, ConfigError, DeviceError.
    """
    set_threads(config, cores=cores or num_cores())
    equipment = setup.equip(config, make_task(config, folder), device=device, speed=speed)
    refuse_private_buffers(equipment.model)
    if config.train.compile:
        compile_blocks(equipment.model)
    return equipment


def choose_uses(wanted: str = "", *, threads: int = 0, config: Config | None = None) -> DeviceChoice:
    """Choose devices, with a worker for each. `wanted`: as in `--devices`; "" or auto: the run's `train.device`. If
    that is auto, too, `choose_devices` decides. `threads` 0: all cores. Raises DeviceError for a missing or broken one.
    """
    named = "" if wanted == AUTO else wanted
    device = named or (config.train.device if config is not None else AUTO)
    if "," in device or (device == AUTO and torch.accelerator.is_available()):
        strict, visible = config is not None and config.sync.strict, os.environ.get("CUDA_VISIBLE_DEVICES")
        return choose_devices(device, _devices(), cores=threads or num_cores(), strict=strict, visible=visible)
    if named:
        choose_device(named)
    return DeviceChoice(uses=(Use(name="", device=named, threads=threads),))
