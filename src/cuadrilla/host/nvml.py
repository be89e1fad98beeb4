"""The child process that asks NVIDIA's management library how busy the cards are.

`python -P -m cuadrilla.host.nvml` answers every line of its input with one JSON object, `{"gpus": [...]}`, and ends
with its input. To the line `users` it tells which process uses a card, and for how much of the time. It may hang, and a
fault in the library ends it: whoever asks it (`host/gpus.py`) expects that. It imports nothing of ours, so that it is
small; it is not for others to import.
"""

import contextlib
import importlib
import json
import sys
import time
from typing import Any

MOST_CARDS = 16
MOST_PROCESSES = 1000
SINCE_SECONDS = 3.0
"""The driver looks a few times a second, and keeps what it saw for a while."""


def answer_lines() -> None:
    """Until the input ends. Without the library or a driver: at once, without an answer."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for line in sys.stdin:
            found = uses(nvml) if line.strip() == "users" else cards(nvml)
            sys.stdout.write(json.dumps({"gpus": found}) + "\n")
            sys.stdout.flush()


def uses(nvml: Any) -> list[dict[str, Any]]:
    """How busy each card is, and [number, percent] of the processes that make it so. Raises NVMLError."""
    found = []
    for index in range(min(nvml.nvmlDeviceGetCount(), MOST_CARDS)):
        card = asked(nvml, "nvmlDeviceGetHandleByIndex", index)
        busy = asked(nvml, "nvmlDeviceGetUtilizationRates", card)
        found.append({"index": index, "busy_percent": getattr(busy, "gpu", None), "users": users(nvml, card)})
    return found


def users(nvml: Any, card: Any) -> list[list[int]] | None:
    """Of the last seconds; the newest of each process. None where the driver does not say: under WSL, of a part."""
    if card is None:
        return None
    since = int((time.time() - SINCE_SECONDS) * 1e6)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(card, since)
    except nvml.NVMLError as error:
        return [] if getattr(error, "value", None) in (nvml.NVML_ERROR_NOT_FOUND, 0) else None  # nobody computes
    newest = {sample.pid: sample.smUtil for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
    return [[pid, percent] for pid, percent in newest.items() if pid and percent <= 100][:MOST_PROCESSES]


def cards(nvml: Any) -> list[dict[str, Any]]:
    """What each card says; what it does not say is None. Raises NVMLError when the driver has gone."""
    found = []
    for index in range(min(nvml.nvmlDeviceGetCount(), MOST_CARDS)):
        card = asked(nvml, "nvmlDeviceGetHandleByIndex", index)
        busy = asked(nvml, "nvmlDeviceGetUtilizationRates", card)
        memory = asked(nvml, "nvmlDeviceGetMemoryInfo", card)
        name = asked(nvml, "nvmlDeviceGetName", card)
        milliwatts = asked(nvml, "nvmlDeviceGetPowerUsage", card)
        found.append(
            {
                "index": index,
                "name": name.decode(errors="replace") if isinstance(name, bytes) else name,
                "busy_percent": getattr(busy, "gpu", None),
                "memory_used_bytes": getattr(memory, "used", None),
                "memory_bytes": getattr(memory, "total", None),
                "temperature_celsius": asked(nvml, "nvmlDeviceGetTemperature", card, nvml.NVML_TEMPERATURE_GPU),
                "power_watts": None if milliwatts is None else milliwatts / 1000,
            }
        )
    return found


def asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """A query's answer, or None: on WSL2, in containers and on parts of a card many are "not supported"."""
    if arguments[0] is None:  # a card that has no handle
        return None
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, OSError):  # OSError: nobody reads the answer any more
        answer_lines()
