"""What this machine works with for a run: its devices are asked only where there is something to choose."""

import os
from functools import cached_property

from cuadrilla.config import Config
from cuadrilla.engines.local import num_cores
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
    def is_one(self) -> bool:
        """Whatever the run says, one process will do."""
        return "," not in self.wanted if self.wanted else not has_accelerator()

    @property
    def only(self) -> Use:
        """The one that `is_one` speaks of."""
        return Use(name="", device=self.wanted, threads=self._threads)

    def choose(self, config: Config) -> DeviceChoice:
        """Raises DeviceError."""
        self.require_named()
        wanted = self.wanted or config.train.device
        if self.is_one or (wanted != AUTO and "," not in wanted):
            return DeviceChoice(uses=(self.only,))
        return self._choose(wanted, strict=config.sync.strict)

    def choose_for_any(self) -> DeviceChoice:
        """Whatever the runs say. Raises DeviceError."""
        self.require_named()
        return DeviceChoice(uses=(self.only,)) if self.is_one else self._choose(self.wanted or AUTO, strict=False)

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
