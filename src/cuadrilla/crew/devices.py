"""What this machine works with: its devices are asked only where there is something to choose."""

import os
from functools import cache

from cuadrilla.config import Config
from cuadrilla.crew.equipment import num_cores
from cuadrilla.host.devices import Device, probe_devices
from cuadrilla.plan.devices import AUTO, DeviceChoice, Use, choose_devices
from cuadrilla.train.precision import choose_device, has_accelerator


def choose_uses(wanted: str = "", *, threads: int = 0, config: Config | None = None) -> DeviceChoice:
    """A worker for each device. `wanted`: as `--devices` has it; "" or auto leaves it to the run's `train.device`, and
    that, if it is auto, to what is measured. `threads` 0: all cores. Raises DeviceError for a device that is not there,
    or is broken.
    """
    named = "" if wanted == AUTO else wanted
    device = named or (config.train.device if config is not None else AUTO)
    if "," in device or (device == AUTO and has_accelerator()):
        strict, visible = config is not None and config.sync.strict, os.environ.get("CUDA_VISIBLE_DEVICES")
        return choose_devices(device, _found(), cores=threads or num_cores(), strict=strict, visible=visible)
    if named:
        choose_device(named)
    return DeviceChoice(uses=(Use(name="", device=named, threads=threads),))


@cache
def _found() -> list[Device]:
    return probe_devices()
