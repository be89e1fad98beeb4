"""How busy the GPUs of this machine are. Never raises, never waits beyond its limit.

NVIDIA's library (NVML) can hang, and can take its process down with it (microsoft/WSL#11277). It is therefore asked in
a child process (`host/probe.py`). After a failure no child is started for a while. An Apple GPU is asked through
`ioreg`, which needs no root. What is not known is None.
"""

import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from cuadrilla.host.probe import CARDS_CHILD
from cuadrilla.host.programs import json_rows, run
from cuadrilla.printable import one_line

IOREG = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
DRIVER_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libnvidia-ml.so.1", r"C:\Windows\System32\nvml.dll")
TIMEOUT_SECONDS = 8.0  # without persistence mode the driver wakes every card first
RETRY_SECONDS = 60.0  # a driver that hung must not hold up every sample
MAX_NAME_CHARACTERS = 200


def _or_unknown(value: object, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:
        return None


OR_UNKNOWN = WrapValidator(_or_unknown)
"""Turns an impossible value into None: from a driver, or in another machine's message."""
Percent = Annotated[Annotated[float, Field(ge=0, le=100)] | None, OR_UNKNOWN]
Bytes = Annotated[Annotated[int, Field(ge=0, le=2**60)] | None, OR_UNKNOWN]
Amount = Annotated[Annotated[float, Field(ge=0, le=1e13)] | None, OR_UNKNOWN]
Celsius = Annotated[Annotated[float, Field(ge=-60, le=250)] | None, OR_UNKNOWN]


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    index: Annotated[int, Field(ge=0, lt=1024)]
    name: Annotated[str, AfterValidator(lambda text: one_line(text, most=MAX_NAME_CHARACTERS))]
    busy_percent: Percent = None
    memory_used_bytes: Bytes = None
    memory_bytes: Bytes = None
    temperature_celsius: Celsius = None
    power_watts: Amount = None


class Gpus:
    """The GPUs of this machine, asked from time to time. `argv`: the program to ask; () for a machine without GPUs."""

    def __init__(self, argv: Sequence[str] | None = None) -> None:
        if argv is None:  # without a driver, each child would only say that there is none
            argv = IOREG if platform.system() == "Darwin" else CARDS_CHILD if has_driver() else ()
        self._argv, self._pause_until = argv, 0.0
        self.is_silent = False
        """Whether there is a driver that did not answer the last question."""

    def sample(self) -> tuple[GpuUsage, ...]:
        """The cards now; () where there are none, or where they did not answer."""
        if not self._argv or time.monotonic() < self._pause_until:
            return ()
        said = run(self._argv, seconds=TIMEOUT_SECONDS)
        told = [row["gpus"] for row in json_rows(said.text) if isinstance(row.get("gpus"), list)]
        rows = parse_ioreg(said.text) if self._argv is IOREG else next(iter(told), None)
        self.is_silent = rows is None
        if self.is_silent:
            self._pause_until = time.monotonic() + RETRY_SECONDS
        names = {field.name for field in fields(GpuUsage)}
        return tuple(GpuUsage(**{name: row[name] for name in names & row.keys()}) for row in rows or ())


def has_driver() -> bool:
    """Whether NVIDIA's driver is here. `nvidia-smi` proves nothing: our CPU image has one that says there is none."""
    return any(os.path.exists(path) for path in DRIVER_FILES if os.path.isabs(path))  # not a file "C:..." here


def parse_ioreg(text: str) -> list[dict[str, Any]]:
    """The row of an Apple GPU, from the `PerformanceStatistics` of its IOAccelerator."""
    busy = re.search(r'"Device Utilization %"\s*=\s*(\d{1,3})\b', text)
    used = re.search(r'"In use system memory"\s*=\s*(\d{1,18})\b', text)
    name = re.search(r'"model"\s*=\s*"([^"]+)"', text)
    if not busy and not used:
        return []
    row = {
        "index": 0,
        "name": name[1] if name else "Apple GPU",
        "busy_percent": float(busy[1]) if busy else None,
        "memory_used_bytes": int(used[1]) if used else None,
    }
    return [row]
