"""How busy this machine is: one sample of processor, memory, disk, network, sensors and the GPUs.

Taking a sample never raises: what cannot be read is None. In a container with limits, processor and memory mean what
the container may use. Samples from other machines are checked against the annotations (pydantic): a value beyond its
bounds becomes None. GPUs: `host/gpus.py`.
"""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from cuadrilla.host.card import real_cards
from cuadrilla.host.container import Cgroups, read_cpu, read_memory
from cuadrilla.host.facts import PSUTIL_ERRORS
from cuadrilla.host.gpus import OR_UNKNOWN, Amount, Bytes, Celsius, Gpus, GpuUsage, Percent

CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """CPU figures and rates are means since the sampler's last sample. 100 % is all that this machine or container may
    use."""

    cpu_percent: Percent = None
    memory_used_bytes: Bytes = None
    memory_bytes: Bytes = None
    disk_free_bytes: Bytes = None
    disk_bytes: Bytes = None
    network_sent_bytes_per_second: Amount = None
    network_received_bytes_per_second: Amount = None
    temperature_celsius: Celsius = None
    battery_percent: Percent = None
    on_battery: Annotated[bool | None, OR_UNKNOWN] = None
    gpus: Annotated[tuple[GpuUsage, ...], Field(max_length=16)] = ()


def usage_data(usage: Usage) -> dict[str, Any]:
    """The known fields of a sample, as plain data for JSON: a few hundred bytes."""
    return asdict(usage, dict_factory=lambda fields: {name: value for name, value in fields if value not in (None, ())})


class Sampler:
    """Takes samples, and keeps the counters of the last one to compute rates. The first sample has no rates.

    `folder`: a folder on the disk to report. Tests pass their own `gpus` and `cgroups` (a container's limits).
    """

    def __init__(self, *, folder: Path | None = None, gpus: Gpus | None = None, cgroups: Cgroups | None = None) -> None:
        self._folder = folder
        self.gpus = gpus or Gpus()
        self._cgroups = cgroups or Cgroups()
        self._last: dict[str, tuple[float, float]] = {}
        """By name of a counter: when it was read last, in monotonic seconds, and its value then."""

    def sample(self) -> Usage:
        """The machine now. Never raises. May take some seconds if a driver hangs."""
        found: dict[str, Any] = {}
        for read in (self._cpu, self._memory, self._disk, self._network, read_battery, _heat):
            with suppress(*PSUTIL_ERRORS):
                found |= read()
        return Usage(**found, gpus=self.gpus.sample())

    def _cpu(self) -> dict[str, Any]:
        limited = read_cpu(self._cgroups)
        if limited is None:
            return {"cpu_percent": psutil.cpu_percent()}
        seconds, cores = limited
        percent = self._rate("quota", 100.0 * seconds / cores)
        return {"cpu_percent": None if percent is None else min(100.0, percent)}

    def _memory(self) -> dict[str, Any]:
        used, memory = read_memory(self._cgroups)
        return {"memory_used_bytes": used, "memory_bytes": memory}

    def _disk(self) -> dict[str, Any]:
        usage = psutil.disk_usage(str(self._folder)) if self._folder is not None else None
        return {"disk_free_bytes": usage.free, "disk_bytes": usage.total} if usage else {}

    def _network(self) -> dict[str, Any]:
        found = psutil.net_io_counters(pernic=True, nowrap=False)
        counted = [found[name] for name in real_cards(found)]
        return {
            "network_sent_bytes_per_second": self._rate("sent", sum(each.bytes_sent for each in counted)),
            "network_received_bytes_per_second": self._rate("received", sum(each.bytes_recv for each in counted)),
        }

    def _rate(self, name: str, counted: float) -> float | None:
        """The increase of a counter per second since the last call."""
        last, now = self._last.get(name), time.monotonic()
        self._last[name] = (now, counted)
        if last is None or now <= last[0]:
            return None
        return round(max(0.0, (counted - last[1]) / (now - last[0])), 1)  # a counter may restart at 0


def _heat() -> dict[str, Any]:
    """Temperature of the chip that is most likely the processor's."""
    chips = psutil.sensors_temperatures()
    known = [max(entry.current for entry in chips[name]) for name in CPU_SENSORS if chips.get(name)]
    return {"temperature_celsius": known[0]} if known else {}


def read_battery() -> dict[str, Any]:
    """The battery's charge, and whether the machine runs on it; {} without a battery. Never raises."""
    found = None
    with suppress(*PSUTIL_ERRORS):
        found = psutil.sensors_battery()
    if found is None:
        return {}
    plugged = found.power_plugged
    return {"battery_percent": found.percent, "on_battery": None if plugged is None else not plugged}
