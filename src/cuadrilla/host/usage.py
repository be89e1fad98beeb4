"""How busy this machine is: one sample of CPU, memory, this process and the GPUs, for monitors.

A sample never raises: what cannot be read is None (on WSL2 the driver answers "[N/A]" to much). NVIDIA is asked
through `nvidia-smi` with a time limit rather than NVML, which can take the process down with it
(microsoft/WSL#11277); an Apple GPU through `ioreg`, which needs no root.
"""

import os
import platform
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from cuadrilla.host.probe import output_of

QUERY = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
IOREG = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
WSL_NVIDIA_SMI = "/usr/lib/wsl/lib/nvidia-smi"  # not on root's PATH
GPU_TIMEOUT_SECONDS = 3.0
GPU_RETRY_SECONDS = 60.0  # a driver that hung must not hold up every sample
PSUTIL_ERRORS = (psutil.Error, OSError, RuntimeError, ValueError, KeyError, AttributeError, NotImplementedError)


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    index: int
    name: str
    busy_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """CPU figures are means since the sampler's last sample (None in its first): 100 is all cores, or one core for
    `process_cpu_percent`."""

    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_bytes: int | None
    process_cpu_percent: float | None
    process_memory_bytes: int | None
    gpus: tuple[GpuUsage, ...]


class Sampler:
    """Takes samples; remembers the counters of the last one. `gpu_argv` replaces the GPU program in tests."""

    def __init__(self, *, pid: int | None = None, gpu_argv: Sequence[str] | None = None) -> None:
        self._pid = pid or os.getpid()
        self._gpu_argv = list(gpu_argv) if gpu_argv is not None else _gpu_argv()
        self._gpu_pause_until = 0.0
        self._busy: tuple[float, float] | None = None  # busy and total seconds of all cores
        self._process: tuple[float, float] | None = None  # CPU seconds of the process, and when

    def sample(self) -> Usage:
        """The machine now. Never raises; may take GPU_TIMEOUT_SECONDS when a driver hangs."""
        memory_used, memory_total = _memory()
        process_cpu, process_memory = self._sample_process()
        return Usage(
            cpu_percent=self._sample_cpu(),
            memory_used_bytes=memory_used,
            memory_bytes=memory_total,
            process_cpu_percent=process_cpu,
            process_memory_bytes=process_memory,
            gpus=self._sample_gpus(),
        )

    def _sample_cpu(self) -> float | None:
        try:
            times = psutil.cpu_times()
        except PSUTIL_ERRORS:
            return None
        # Guest time is already counted in user time.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        now = (total - times.idle - getattr(times, "iowait", 0.0), total)
        last, self._busy = self._busy, now
        return _percent(last, now)

    def _sample_process(self) -> tuple[float | None, int | None]:
        try:
            process = psutil.Process(self._pid)
            with process.oneshot():
                seconds, memory = process.cpu_times(), process.memory_info().rss
        except PSUTIL_ERRORS:
            return None, None
        now = (seconds.user + seconds.system, time.monotonic())
        last, self._process = self._process, now
        return _percent(last, now), memory

    def _sample_gpus(self) -> tuple[GpuUsage, ...]:
        if not self._gpu_argv or time.monotonic() < self._gpu_pause_until:
            return ()
        text = output_of(self._gpu_argv, timeout_seconds=GPU_TIMEOUT_SECONDS)
        if text is None:
            self._gpu_pause_until = time.monotonic() + GPU_RETRY_SECONDS
            return ()
        return parse_ioreg(text) if self._gpu_argv[0].endswith("ioreg") else parse_nvidia_smi(text)


def _percent(last: tuple[float, float] | None, now: tuple[float, float]) -> float | None:
    if last is None or now[1] <= last[1]:
        return None
    return max(0.0, 100.0 * (now[0] - last[0]) / (now[1] - last[1]))


def _memory() -> tuple[int | None, int | None]:
    try:
        memory = psutil.virtual_memory()
    except PSUTIL_ERRORS:
        return None, None
    return memory.total - memory.available, memory.total


def _gpu_argv() -> list[str]:
    """The program that knows this machine's GPUs; empty if there is none."""
    if platform.system() == "Darwin":
        return list(IOREG)
    found = shutil.which("nvidia-smi") or (WSL_NVIDIA_SMI if os.path.exists(WSL_NVIDIA_SMI) else None)
    return [found, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"] if found else []


def parse_nvidia_smi(text: str) -> tuple[GpuUsage, ...]:
    """One GPU per line of `QUERY`; fields that are no number ("[N/A]") are None."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 7 or not fields[0].isdigit():
            continue
        busy, used, total, temperature, power = (_number(field) for field in fields[2:])
        gpus.append(
            GpuUsage(
                index=int(fields[0]),
                name=fields[1],
                busy_percent=busy,
                memory_used_bytes=None if used is None else int(used * 2**20),
                memory_bytes=None if total is None else int(total * 2**20),
                temperature_celsius=temperature,
                power_watts=power,
            )
        )
    return tuple(gpus)


def parse_ioreg(text: str) -> tuple[GpuUsage, ...]:
    """An Apple GPU from the `PerformanceStatistics` of its IOAccelerator."""
    busy = re.search(r'"Device Utilization %"\s*=\s*(\d+)', text)
    used = re.search(r'"In use system memory"\s*=\s*(\d+)', text)
    name = re.search(r'"model"\s*=\s*"([^"]+)"', text)
    if not busy and not used:
        return ()
    return (
        GpuUsage(
            index=0,
            name=name[1] if name else "Apple GPU",
            busy_percent=float(busy[1]) if busy else None,
            memory_used_bytes=int(used[1]) if used else None,
        ),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None
