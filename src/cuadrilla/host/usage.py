"""How busy this machine is: one sample of processor, memory, disk, network, sensors, this process and the GPUs.

A sample never raises: what cannot be read is None. In a container with limits the processor and the memory are those
that the container may use. `usage_data` and `parse_usage` carry a sample to other machines and into files; what comes
back may be anybody's, so every number has a range and every name a length. GPUs: `host/gpus.py`.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cuadrilla.host.container import Cgroups, find_cgroups, read_cpu, read_memory
from cuadrilla.host.gpus import MOST_CELSIUS, Gpus, GpuUsage, bounded, count, parse_gpus
from cuadrilla.host.room import UNKNOWN, room_of

PSUTIL_ERRORS = (psutil.Error, OSError, RuntimeError, ValueError, KeyError, AttributeError, NotImplementedError)
SENSOR_SECONDS = 15.0
"""Temperatures and batteries change slowly, and some chips take 10 ms to answer."""
MOST_RATE = 1e13
MOST_PROCESS_PERCENT = 1e6  # ten thousand cores
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")
VIRTUAL = re.compile(
    r"(?i)(lo\d*$|loopback|veth|docker|br-|virbr|cni|flannel|cali|ifb|tun|tap|wg|utun|tailscale|bridge)"
)
"""Interfaces whose bytes are counted once more by a real one, or never leave the machine."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """CPU figures and rates are means since the sampler's last sample (None in its first). 100 is all that this machine
    or container may use, or one core for `process_cpu_percent`."""

    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    process_cpu_percent: float | None = None
    process_memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_bytes: int | None = None
    disk_read_bytes_per_second: float | None = None
    disk_written_bytes_per_second: float | None = None
    network_sent_bytes_per_second: float | None = None
    network_received_bytes_per_second: float | None = None
    temperature_celsius: float | None = None
    battery_percent: float | None = None
    on_battery: bool | None = None
    gpus: tuple[GpuUsage, ...] = ()


def usage_data(usage: Usage) -> dict[str, Any]:
    """What is known of it, as plain data for JSON: a few hundred bytes."""
    known = {key: _short(value) for key, value in asdict(usage).items() if value is not None and key != "gpus"}
    if usage.gpus:
        known["gpus"] = [
            {key: _short(value) for key, value in asdict(gpu).items() if value is not None} for gpu in usage.gpus
        ]
    return known


def whole_usage_data(usage: Usage) -> dict[str, Any]:
    """The same with every name: None for what is not known."""
    known = usage_data(usage)
    gpus = [dict.fromkeys(GpuUsage.__dataclass_fields__) | gpu for gpu in known.get("gpus", ())]
    return dict.fromkeys(Usage.__dataclass_fields__) | known | {"gpus": gpus}


def _short(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


def parse_usage(row: Mapping[str, Any]) -> Usage:
    """From plain data that anybody may have sent or written. What is out of range is not known; never raises."""
    on_battery = row.get("on_battery")
    return Usage(
        cpu_percent=bounded(row.get("cpu_percent"), most=100.0),
        memory_used_bytes=count(row.get("memory_used_bytes")),
        memory_bytes=count(row.get("memory_bytes")),
        process_cpu_percent=bounded(row.get("process_cpu_percent"), most=MOST_PROCESS_PERCENT),
        process_memory_bytes=count(row.get("process_memory_bytes")),
        disk_free_bytes=count(row.get("disk_free_bytes")),
        disk_bytes=count(row.get("disk_bytes")),
        disk_read_bytes_per_second=bounded(row.get("disk_read_bytes_per_second"), most=MOST_RATE),
        disk_written_bytes_per_second=bounded(row.get("disk_written_bytes_per_second"), most=MOST_RATE),
        network_sent_bytes_per_second=bounded(row.get("network_sent_bytes_per_second"), most=MOST_RATE),
        network_received_bytes_per_second=bounded(row.get("network_received_bytes_per_second"), most=MOST_RATE),
        temperature_celsius=bounded(row.get("temperature_celsius"), least=-60.0, most=MOST_CELSIUS),
        battery_percent=bounded(row.get("battery_percent"), most=100.0),
        on_battery=on_battery if isinstance(on_battery, bool) else None,
        gpus=parse_gpus(row.get("gpus")),
    )


class Sampler:
    """Takes samples; remembers the counters of the last one. `close` ends the process that watches the GPUs.

    `folder`: whose disk to look at. In tests `gpus` and `cgroups` (where a container's limits are) are others.
    """

    def __init__(
        self,
        *,
        pid: int | None = None,
        folder: Path | None = None,
        gpus: Gpus | None = None,
        cgroups: Cgroups | None = None,
    ) -> None:
        self._pid = pid or os.getpid()
        self._folder = folder
        self._gpus = gpus or Gpus()
        self._cgroups = cgroups or (find_cgroups() if sys.platform == "linux" else None)
        self._cores = _allowed_cores()
        self._last: dict[str, tuple[float, float]] = {}
        """By what is counted: the count, and when it was read (or out of how much)."""
        self._sensors: tuple[float | None, float | None, bool | None] = (None, None, None)
        self._sensors_until = 0.0

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._gpus.close()

    @property
    def gpus_silent(self) -> bool:
        """Whether a GPU's driver is here that did not answer in the last sample."""
        return self._gpus.is_silent

    def sample(self) -> Usage:
        """The machine now. Never raises; may take some seconds when a driver hangs, if nobody calls `close`."""
        memory_used, memory_total = self._sample_memory()
        process_cpu, process_memory = self._sample_process()
        disk_free, disk_total = room_of(self._folder) if self._folder is not None else UNKNOWN
        read, written = _counters(lambda: psutil.disk_io_counters(nowrap=False), "read_bytes", "write_bytes")
        sent, received = _network()
        temperature, battery, on_battery = self._sample_sensors()
        return Usage(
            cpu_percent=self._sample_cpu(),
            memory_used_bytes=memory_used,
            memory_bytes=memory_total,
            process_cpu_percent=process_cpu,
            process_memory_bytes=process_memory,
            disk_free_bytes=disk_free,
            disk_bytes=disk_total,
            disk_read_bytes_per_second=self._rate("read", read),
            disk_written_bytes_per_second=self._rate("written", written),
            network_sent_bytes_per_second=self._rate("sent", sent),
            network_received_bytes_per_second=self._rate("received", received),
            temperature_celsius=temperature,
            battery_percent=battery,
            on_battery=on_battery,
            gpus=self._gpus.sample(),
        )

    def _sample_cpu(self) -> float | None:
        limited = read_cpu(self._cgroups) if self._cgroups is not None else None
        if limited is not None:
            seconds, cores = limited
            part = self._part("quota", seconds, time.monotonic() * cores)
        else:
            times = _cpu_times(self._cores)
            part = None if times is None else self._part("cores", *times)
        return None if part is None else min(100.0, 100.0 * part)

    def _sample_memory(self) -> tuple[int | None, int | None]:
        try:
            memory = psutil.virtual_memory()
        except PSUTIL_ERRORS:
            return None, None
        limited = read_memory(self._cgroups) if self._cgroups is not None else None
        if limited is not None and limited[1] < memory.total:
            return limited
        return memory.total - memory.available, memory.total

    def _sample_process(self) -> tuple[float | None, int | None]:
        try:
            process = psutil.Process(self._pid)
            with process.oneshot():
                seconds, memory = process.cpu_times(), process.memory_info().rss
        except PSUTIL_ERRORS:
            return None, None
        rate = self._rate("process", seconds.user + seconds.system)
        return None if rate is None else 100.0 * rate, memory

    def _sample_sensors(self) -> tuple[float | None, float | None, bool | None]:
        """Of the CPU: degrees; of the battery: percent, and whether the machine runs on it."""
        if time.monotonic() >= self._sensors_until:
            self._sensors_until = time.monotonic() + SENSOR_SECONDS
            self._sensors = (_temperature(), *read_battery())
        return self._sensors

    def _rate(self, name: str, counted: float | None) -> float | None:
        return None if counted is None else self._part(name, counted, time.monotonic())

    def _part(self, name: str, counted: float, total: float) -> float | None:
        """How much was counted since the last time, for each one of `total`."""
        last = self._last.get(name)
        self._last[name] = (counted, total)
        if last is None or total <= last[1]:
            return None
        return max(0.0, (counted - last[0]) / (total - last[1]))  # a counter may begin anew


def _allowed_cores() -> frozenset[int]:
    """Those that this process may run on if they are not all (`docker run --cpuset-cpus`), else none."""
    if sys.platform != "linux":
        return frozenset()
    allowed = os.sched_getaffinity(0)
    return frozenset(allowed) if len(allowed) < (os.cpu_count() or 1) else frozenset()


def _cpu_times(cores: frozenset[int]) -> tuple[float, float] | None:
    """(busy seconds, all seconds) of these cores, or of all, since the machine began."""
    try:
        each = psutil.cpu_times(percpu=True) if cores else [psutil.cpu_times()]
    except PSUTIL_ERRORS:
        return None
    if cores and len(each) > max(cores):  # with a core that is switched off their places say nothing
        each = [each[core] for core in sorted(cores)]
    # Guest time is already counted in user time.
    total = sum(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) for times in each)
    return total - sum(times.idle + getattr(times, "iowait", 0.0) for times in each), total


def _counters(read: Callable[[], Any], *names: str) -> tuple[float | None, ...]:
    try:
        counters = read()
    except PSUTIL_ERRORS:
        counters = None
    return tuple(None if counters is None else float(getattr(counters, name)) for name in names)


def _network() -> tuple[float | None, float | None]:
    """Bytes sent and received so far by the interfaces that count."""
    try:
        found = psutil.net_io_counters(pernic=True, nowrap=False)
    except PSUTIL_ERRORS:
        return None, None
    counted = [found[name] for name in counted_interfaces(found)]
    if not counted:
        return None, None
    return float(sum(one.bytes_sent for one in counted)), float(sum(one.bytes_recv for one in counted))


def counted_interfaces(names: Iterable[str]) -> list[str]:
    """Those whose bytes add up to what the machine has sent: real ones if there are any, never the loopback."""
    outer = [name for name in names if not re.match(r"(?i)lo\d*$|loopback", name)]
    return [name for name in outer if not VIRTUAL.match(name)] or outer


def _temperature() -> float | None:
    try:
        found = psutil.sensors_temperatures()
    except PSUTIL_ERRORS:
        return None
    return cpu_temperature({chip: [entry.current for entry in entries] for chip, entries in found.items()})


def cpu_temperature(chips: Mapping[str, Sequence[float | None]]) -> float | None:
    """The hottest figure of the chip that is most likely the processor's."""
    for name in CPU_SENSORS:
        known = [value for value in chips.get(name, ()) if bounded(value, least=1.0, most=MOST_CELSIUS) is not None]
        if known:
            return max(value for value in known if value is not None)
    return None


def read_battery() -> tuple[float | None, bool | None]:
    """Percent, and whether the machine runs on it; None where there is none, or it does not say. Never raises."""
    try:
        found = psutil.sensors_battery()
    except PSUTIL_ERRORS:
        return None, None
    if found is None:
        return None, None
    plugged = found.power_plugged
    return bounded(found.percent, most=100.0), None if plugged is None else not plugged
