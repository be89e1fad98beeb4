"""How busy the GPUs of this machine are, and who uses them: never raises and never waits longer than its limits.

NVIDIA's library (NVML) can hang, and can take its process down with it (microsoft/WSL#11277). It is therefore asked in
a child process (`host/nvml.py`), which stays and answers a line for each line that it is sent; one that dies or is late
is left alone for a while. An Apple GPU is asked through `ioreg`, which needs no root. What is not known is None: WSL2
tells no programs apart, and in a container the numbers of processes are its host's.
"""

import contextlib
import json
import os
import platform
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuadrilla.host.programs import kill, run
from cuadrilla.printable import one_line

IOREG = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
DRIVER_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libnvidia-ml.so.1", r"C:\Windows\System32\nvml.dll")
NVML_CHILD = (sys.executable, "-P", "-m", "cuadrilla.host.nvml")
TIMEOUT_SECONDS = 3.0
START_SECONDS = 8.0  # without persistence mode the driver wakes every card first
RETRY_SECONDS = 60.0  # a driver that hung must not hold up every sample
MOST_GPUS = 16
MOST_NAME_CHARACTERS = 200
MOST_BYTES = 2**60
MAX_LINE_BYTES = 2**20
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
    """The process that asks NVML. After a problem it is gone, and the next question starts another."""

    def __init__(self, argv: Sequence[str] = NVML_CHILD) -> None:
        self._argv = list(argv)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def ask(self) -> Mapping[str, Any]:
        """What the child says: `driver` and `gpus`, or `problem`. Takes `TIMEOUT_SECONDS` at most, the first time
        `START_SECONDS`."""
        seconds = TIMEOUT_SECONDS if self._process is not None else START_SECONDS
        said: Any = None
        try:
            process = self._process or self._start()
            with contextlib.suppress(OSError):  # without a driver it has answered and gone
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.flush()
            said = json.loads(self._lines.get(timeout=seconds))
        except (OSError, ValueError, RecursionError, queue.Empty):  # ValueError: its pipe is closed, or it is no JSON
            pass
        if isinstance(said, dict) and isinstance(said.get("gpus"), list):
            return said
        self.close()
        problem = said.get("problem") if isinstance(said, dict) else None
        return {"problem": problem if isinstance(problem, str) else "it does not answer"}

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
        while process.stdout is not None and (line := process.stdout.readline(MAX_LINE_BYTES)):
            lines.put(line)
    lines.put(b"")


class Gpus:
    """The GPUs of this machine, asked now and then. `argv`: the child for NVML; () for a machine without GPUs."""

    def __init__(self, argv: Sequence[str] | None = None) -> None:
        self._is_apple = argv is None and platform.system() == "Darwin"
        if argv is None:  # where no driver is, a child would only say so, every minute
            argv = NVML_CHILD if has_driver() else ()
        self._nvml = NvmlChild(argv) if argv else None
        self._pause_until = 0.0
        self.is_silent = False
        """Whether a driver is here that did not answer the last question."""

    def sample(self) -> tuple[GpuUsage, ...]:
        return parse_gpus(self._ask())

    def uses(self) -> tuple["CardUse", ...]:
        return parse_uses(self._ask())

    def _ask(self) -> list[Any]:
        """A row for each card."""
        if (self._nvml is None and not self._is_apple) or time.monotonic() < self._pause_until:
            return []
        if self._nvml is not None:
            rows = self._nvml.ask().get("gpus")
        else:
            said = run(IOREG, seconds=TIMEOUT_SECONDS)
            rows = parse_ioreg(said.text) if said is not None and said.ok else None
        self.is_silent = rows is None
        if rows is None:
            self._pause_until = time.monotonic() + RETRY_SECONDS
            return []
        return list(rows)

    def close(self) -> None:
        """End the child; another question starts another one. From any thread: who waits for an answer goes on."""
        if self._nvml is not None:
            self._nvml.close()


def has_driver() -> bool:
    """Whether NVIDIA's driver is here. `nvidia-smi` alone proves nothing: our image for CPUs has one that says so."""
    return any(os.path.exists(path) for path in DRIVER_FILES if os.path.isabs(path))  # not "C:..." in this folder


@dataclass(frozen=True, kw_only=True)
class CardUse:
    """Parts of the time, 0 to 1. `busy`: of all together; `users`: by process, None where that is not told."""

    busy: float | None = None
    users: Mapping[int, float] | None = None


def parse_uses(rows: Sequence[Any]) -> tuple[CardUse, ...]:
    cards = []
    for row in rows:
        busy, users = row.get("busy_percent"), row.get("users")
        by_process = None if users is None else {pid: percent / 100 for pid, percent in users}
        cards.append(CardUse(busy=None if busy is None else busy / 100, users=by_process))
    return tuple(cards)


def others_on(
    cards: Sequence[CardUse], *, ours: Collection[int], told_apart: bool, all_are_others: bool
) -> float | None:
    """Part of the card that others use most; None where nothing is known of any card.

    `told_apart`: the numbers of processes are this machine's. `all_are_others`: none of ours computes at the moment.
    """
    found = []
    for card in cards:
        if card.users is not None and told_apart:
            found.append(min(1.0, sum(part for pid, part in card.users.items() if pid not in ours)))
        elif card.busy is not None and all_are_others:
            found.append(card.busy)
    return max(found, default=None)


def parse_ioreg(text: str) -> list[dict[str, Any]]:
    """A row for an Apple GPU, from the `PerformanceStatistics` of its IOAccelerator."""
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
