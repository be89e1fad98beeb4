"""What this machine works with for a run: its devices are asked only where there is something to choose."""

import os
from collections.abc import Callable
from functools import cached_property

from cuadrilla.config import Config
from cuadrilla.crew.equipment import num_cores
from cuadrilla.host.devices import Device, probe_devices
from cuadrilla.plan.devices import AUTO, DeviceChoice, Use, choose_devices
from cuadrilla.train.precision import choose_device, has_accelerator


class Devices:
    """`wanted`: as `--devices` has it; "" or auto leaves it to the run's `train.device`, and that, if it is auto, to
    what is measured. `threads` 0: all cores.
    """

    def __init__(self, wanted: str = "", *, threads: int = 0) -> None:
        self.wanted = "" if wanted == AUTO else wanted
        self._threads = threads

    @property
    def _is_one(self) -> bool:
        """Whatever the run says, one process will do."""
        return "," not in self.wanted if self.wanted else not has_accelerator()

    @property
    def only(self) -> Use:
        """That one."""
        return Use(name="", device=self.wanted, threads=self._threads)

    def choose(self, settings: Callable[[], Config] | None = None) -> DeviceChoice:
        """For a run with these settings, which are asked for only where there is something to choose; or for any run.
        Raises DeviceError."""
        self.require_named()
        only = DeviceChoice(uses=(self.only,))
        if self._is_one:
            return only
        if settings is None:
            return self._choose(self.wanted or AUTO, strict=False)
        config = settings()
        wanted = self.wanted or config.train.device
        return self._choose(wanted, strict=config.sync.strict) if wanted == AUTO or "," in wanted else only

    def require_named(self) -> None:
        """Before anything is asked for or fetched. Raises DeviceError for a device that is not there, or is sick."""
        if "," in self.wanted:
            self._choose(self.wanted, strict=False)
        elif self.wanted:
            choose_device(self.wanted)

    def _choose(self, wanted: str, *, strict: bool) -> DeviceChoice:
        cores, visible = self._threads or num_cores(), os.environ.get("CUDA_VISIBLE_DEVICES")
        return choose_devices(wanted, self._found, cores=cores, strict=strict, visible=visible)

    @cached_property
    def _found(self) -> list[Device]:
        return probe_devices()
