"""The child process that asks NVIDIA's management library how busy the cards are.

`python -P -m cuadrilla.host.nvml` answers every line of its input with one JSON object, `{"gpus": [...]}`, and ends
with its input. It may hang, and a fault in the library ends it: whoever asks it (`host/gpus.py`) expects that. It
imports nothing of ours, so that it is small; it is not for others to import.
"""

import contextlib
import importlib
import json
import sys
from typing import Any

MOST_CARDS = 16


def answer_lines() -> None:
    """Until the input ends. Without the library or a driver: at once, without an answer."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for _ in sys.stdin:
            sys.stdout.write(json.dumps({"gpus": cards(nvml)}) + "\n")
            sys.stdout.flush()


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
