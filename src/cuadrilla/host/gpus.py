"""How busy the GPUs of this machine are: one sample, that never raises and never waits longer than its limits.

NVIDIA's library (NVML) can hang, and can take its process down with it (microsoft/WSL#11277). It is therefore asked in
a child process (`host/nvml.py`), which stays and answers a line for each line that it is sent. If the child dies or is
late, `nvidia-smi` is asked, then nobody for a while. An Apple GPU is asked through `ioreg`, which needs no root.
What is not known is None: on WSL2 the driver answers "[N/A]" to much.
"""

import contextlib
import math
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuadrilla.host.probe import kill, output_of, parse_rows
from cuadrilla.printable import one_line

QUERY = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
IOREG = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
WSL_NVIDIA_SMI = "/usr/lib/wsl/lib/nvidia-smi"  # not on root's PATH
DRIVER_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libnvidia-ml.so.1", r"C:\Windows\System32\nvml.dll")
NVML_CHILD = (sys.executable, "-P", "-m", "cuadrilla.host.nvml")
TIMEOUT_SECONDS = 3.0
START_SECONDS = 8.0  # without persistence mode the driver wakes every card first
RETRY_SECONDS = 60.0  # a driver that hung must not hold up every sample
MOST_GPUS = 16
MOST_NAME_CHARACTERS = 200
MOST_BYTES = 2**60
MOST_LINE_BYTES = 2**16
MOST_INDEX = 1023
MOST_CELSIUS, MOST_WATTS = 250.0, 10_000.0


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    index: int
    name: str
    busy_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


def bounded(value: object, *, least: float = 0.0, most: float) -> float | None:
    """A number between the bounds; anything else, and anything beyond them, is not known."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        return None  # NaN is in no range
    return float(value)


def count(value: object, *, most: int = MOST_BYTES) -> int | None:
    found = bounded(value, most=most)
    return None if found is None else int(found)


def parse_gpus(value: object) -> tuple[GpuUsage, ...]:
    """From plain data that anybody may have sent: at most `MOST_GPUS`, each number in a range that can be."""
    rows = value[:MOST_GPUS] if isinstance(value, list) else []
    return tuple(_gpu(row, place) for place, row in enumerate(rows) if isinstance(row, Mapping))


def _gpu(row: Mapping[str, Any], place: int) -> GpuUsage:
    index, name = count(row.get("index"), most=MOST_INDEX), row.get("name")
    return GpuUsage(
        index=place if index is None else index,
        name=one_line(name, most=MOST_NAME_CHARACTERS) if isinstance(name, str) else "GPU",
        busy_percent=bounded(row.get("busy_percent"), most=100.0),
        memory_used_bytes=count(row.get("memory_used_bytes")),
        memory_bytes=count(row.get("memory_bytes")),
        temperature_celsius=bounded(row.get("temperature_celsius"), least=-60.0, most=MOST_CELSIUS),
        power_watts=bounded(row.get("power_watts"), most=MOST_WATTS),
    )


class NvmlChild:
    """The process that asks NVML. `ask` gives None when it did not answer, and then the process is gone."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def ask(self) -> tuple[GpuUsage, ...] | None:
        rows = self.rows()
        return None if rows is None else parse_gpus(rows)

    def rows(self, question: bytes = b"") -> list[Any] | None:
        """Never raises. Takes `TIMEOUT_SECONDS` at most, the first time `START_SECONDS`."""
        seconds = TIMEOUT_SECONDS if self._process is not None else START_SECONDS
        try:
            process = self._process or self._start()
            if process.stdin is not None:
                process.stdin.write(question + b"\n")
                process.stdin.flush()
            rows, _ = parse_rows(self._lines.get(timeout=seconds).decode(errors="replace"))
        except (OSError, ValueError, queue.Empty):  # ValueError: its pipe is closed
            rows = []
        if not rows or not isinstance(rows[0].get("gpus"), list):
            self.close()
            return None
        found: list[Any] = rows[0]["gpus"]
        return found

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            start_new_session=os.name == "posix",  # Ctrl-C is for us
        )
        self._process, self._lines = process, queue.SimpleQueue()
        self._reader = threading.Thread(target=_read_lines, args=(process, self._lines), name="nvml", daemon=True)
        self._reader.start()
        return process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        kill(process)
        reads = self._reader
        if reads is not None:
            reads.join(TIMEOUT_SECONDS)
        # A driver may hold the child beyond its end; closing what a thread still reads from would wait for that.
        pipes = (process.stdin, None if reads is not None and reads.is_alive() else process.stdout)
        for pipe in pipes:
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _read_lines(process: "subprocess.Popen[bytes]", lines: "queue.SimpleQueue[bytes]") -> None:
    """Until the child closes its end; then an empty line, so that nobody waits for one that will not come."""
    with contextlib.suppress(OSError, ValueError):
        while process.stdout is not None and (line := process.stdout.readline(MOST_LINE_BYTES)):
            lines.put(line)
    lines.put(b"")


class GpuSampler:
    """Asks NVML's child, then a program; who failed is left alone for `RETRY_SECONDS`.

    `argv`: the program instead of the one that is found. `nvml_argv`: the child, or () for none.
    """

    def __init__(self, *, argv: Sequence[str] | None = None, nvml_argv: Sequence[str] | None = None) -> None:
        self._argv = list(argv) if argv is not None else gpu_argv()
        self._expected = argv is not None or bool(nvml_argv) or platform.system() == "Darwin" or has_driver()
        if nvml_argv is None:  # where no driver is, a child would only say so, every minute
            nvml_argv = NVML_CHILD if argv is None and has_driver() else ()
        self._nvml = NvmlChild(nvml_argv) if nvml_argv else None
        self._nvml_pause_until = self._pause_until = 0.0
        self._closed = False
        self.is_silent = False
        """Something here could have told of GPUs in the last sample, and did not."""

    def sample(self) -> tuple[GpuUsage, ...]:
        gpus = self._ask()
        self.is_silent = gpus is None and self._expected and bool(self._argv or self._nvml)
        return gpus or ()

    def _ask(self) -> tuple[GpuUsage, ...] | None:
        """None when nobody has answered."""
        if self._nvml is not None and time.monotonic() >= self._nvml_pause_until:
            gpus = self._nvml.ask()
            if gpus is not None:
                return gpus
            self._nvml_pause_until = time.monotonic() + RETRY_SECONDS
        if self._closed or not self._argv or time.monotonic() < self._pause_until:
            return None
        text = output_of(self._argv, timeout_seconds=TIMEOUT_SECONDS)
        if text is None:
            self._pause_until = time.monotonic() + RETRY_SECONDS
            return None
        return parse_ioreg(text) if self._argv[0].endswith("ioreg") else parse_nvidia_smi(text)

    def close(self) -> None:
        """From any thread: another one that waits for an answer goes on at once."""
        self._closed = True
        if self._nvml is not None:
            self._nvml.close()


def gpu_argv() -> list[str]:
    """The program that knows this machine's GPUs; empty if there is none."""
    if platform.system() == "Darwin":
        return list(IOREG)
    found = shutil.which("nvidia-smi") or (WSL_NVIDIA_SMI if os.path.exists(WSL_NVIDIA_SMI) else None)
    return [found, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"] if found else []


def has_driver() -> bool:
    """Whether NVIDIA's driver is here. `nvidia-smi` alone proves nothing: our image for CPUs has one that says so."""
    return any(os.path.exists(path) for path in DRIVER_FILES if os.path.isabs(path))  # not "C:..." in this folder


def parse_nvidia_smi(text: str) -> tuple[GpuUsage, ...]:
    """One GPU per line of `QUERY`; fields that are no number ("[N/A]") are None."""
    rows = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 7 or not fields[0].isdecimal():
            continue
        busy, used, total, temperature, power = (_number(field) for field in fields[2:])
        rows.append(
            {
                "index": int(fields[0]),
                "name": fields[1],
                "busy_percent": busy,
                "memory_used_bytes": None if used is None else used * 2**20,
                "memory_bytes": None if total is None else total * 2**20,
                "temperature_celsius": temperature,
                "power_watts": power,
            }
        )
    return parse_gpus(rows)


def parse_ioreg(text: str) -> tuple[GpuUsage, ...]:
    """An Apple GPU from the `PerformanceStatistics` of its IOAccelerator."""
    busy = re.search(r'"Device Utilization %"\s*=\s*(\d{1,3})\b', text)
    used = re.search(r'"In use system memory"\s*=\s*(\d{1,18})\b', text)
    name = re.search(r'"model"\s*=\s*"([^"]+)"', text)
    if not busy and not used:
        return ()
    row = {
        "index": 0,
        "name": name[1] if name else "Apple GPU",
        "busy_percent": float(busy[1]) if busy else None,
        "memory_used_bytes": int(used[1]) if used else None,
    }
    return parse_gpus([row])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
