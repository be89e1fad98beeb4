"""The child process that asks NVIDIA's management library (NVML) about the cards.

`python -P -m cuadrilla.host.nvml` answers every line of its input with one JSON object, {"driver": ..., "gpus": [...]},
and ends with its input; {"problem": ...} says that the library is there and does not work. It may hang, and a fault in
the library ends it: whoever asks it (`host/gpus.py`) expects that. It imports nothing of ours, so that it is small; it
is not for others to import.
"""

import contextlib
import importlib
import json
import sys
import time
from typing import Any

MAX_CARDS = 16
MAX_PROCESSES = 1000
SINCE_SECONDS = 3.0
"""The driver looks a few times a second, and keeps what it saw for a while."""


def answer_lines() -> None:
    """Until the input ends. Without the library or a driver: at once."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return
    except nvml.NVMLError as error:
        # Without a driver it is an ordinary machine; with anything else a broken one.
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            _say(gpus=[])
        else:
            _say(problem=str(error))
        return
    for _ in sys.stdin:
        try:
            _say(driver=asked(nvml, "nvmlSystemGetDriverVersion"), gpus=cards(nvml))
        except nvml.NVMLError as error:  # the driver has gone
            _say(problem=str(error))


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def cards(nvml: Any) -> list[dict[str, Any]]:
    """What each card says; what it does not say is None. Raises NVMLError when the driver has gone."""
    found = []
    for index in range(min(nvml.nvmlDeviceGetCount(), MAX_CARDS)):
        card = asked(nvml, "nvmlDeviceGetHandleByIndex", index)
        busy = asked(nvml, "nvmlDeviceGetUtilizationRates", card)
        memory = asked(nvml, "nvmlDeviceGetMemoryInfo", card)
        milliwatts = asked(nvml, "nvmlDeviceGetPowerUsage", card)
        found.append(
            {
                "index": index,
                "name": asked(nvml, "nvmlDeviceGetName", card),
                "uuid": asked(nvml, "nvmlDeviceGetUUID", card),
                "capability": asked(nvml, "nvmlDeviceGetCudaComputeCapability", card),
                "busy_percent": getattr(busy, "gpu", None),
                "memory_used_bytes": getattr(memory, "used", None),
                "memory_bytes": getattr(memory, "total", None),
                "free_bytes": getattr(memory, "free", None),
                "temperature_celsius": asked(nvml, "nvmlDeviceGetTemperature", card, nvml.NVML_TEMPERATURE_GPU),
                "power_watts": None if milliwatts is None else milliwatts / 1000,
                "users": users(nvml, card),
            }
        )
    return found


def users(nvml: Any, card: Any) -> list[list[int]] | None:
    """[number, percent of the time] of the processes that used the card in the last seconds. None where the driver does
    not say: under WSL, of a part of a card."""
    if card is None:
        return None
    since = int((time.time() - SINCE_SECONDS) * 1e6)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(card, since)
    except nvml.NVMLError as error:
        return [] if getattr(error, "value", None) in (nvml.NVML_ERROR_NOT_FOUND, 0) else None  # nobody computes
    newest = {sample.pid: sample.smUtil for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
    return [[pid, percent] for pid, percent in newest.items() if pid and percent <= 100][:MAX_PROCESSES]


def asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """A query's answer, or None: on WSL2, in containers and on parts of a card many are "not supported"."""
    if arguments and arguments[0] is None:  # a card that has no handle
        return None
    try:
        value = getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, OSError):  # OSError: nobody reads the answer any more
        answer_lines()
