"""The child process that asks the GPUs. Drivers may hang, crash with a signal or print rubbish; here it does no harm.

`python -P -m cuadrilla.host.probe` prints JSON objects, one per line, as soon as it has them: torch's version, what
NVIDIA's library (NVML) says of the cards, and each device that torch sees, with whether it computes. With `cards` it
asks NVML only, which takes 50 ms. It is small, since it imports none of our modules. Its callers limit its time.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

CHILD = (sys.executable, "-P", "-m", "cuadrilla.host.probe")
"""-P: a file torch.py or json.py in the user's folder must not shadow the real one."""
CARDS_CHILD = (*CHILD, "cards")
MAX_CARDS = 16
NVIDIA = "0x10de"
"""NVIDIA's vendor number on the PCI bus."""


def main(*, cards_only: bool) -> None:
    if cards_only:
        tell_cards()
    else:
        tell_torch()
    _emit("end")


def _emit(stage: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"stage": stage, **fields}) + "\n")
    sys.stdout.flush()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# NVIDIA's library


def tell_cards() -> None:
    """Print what NVML says. `problem`: the library's error. `without_driver`: there is a card without a driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        _emit("cards", driver=_asked(nvml, "nvmlSystemGetDriverVersion"), gpus=_cards(nvml))
    except ImportError:
        _emit("cards", gpus=[])
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            _emit("cards", problem=str(error))
        else:
            _emit("cards", gpus=[], without_driver=_has_card())


def _has_card() -> bool:
    with contextlib.suppress(OSError):
        return any(file.read_text().strip() == NVIDIA for file in Path("/sys/bus/pci/devices").glob("*/vendor"))
    return False


def _cards(nvml: Any) -> list[dict[str, Any]]:
    """What each card reports. None: the card does not report it. Raises NVMLError when the driver has gone."""
    found = []
    for index in range(min(nvml.nvmlDeviceGetCount(), MAX_CARDS)):
        card = _asked(nvml, "nvmlDeviceGetHandleByIndex", index)
        busy = _asked(nvml, "nvmlDeviceGetUtilizationRates", card)
        memory = _asked(nvml, "nvmlDeviceGetMemoryInfo", card)
        milliwatts = _asked(nvml, "nvmlDeviceGetPowerUsage", card)
        found.append(
            {
                "index": index,
                "name": _asked(nvml, "nvmlDeviceGetName", card) or "GPU",
                "capability": _asked(nvml, "nvmlDeviceGetCudaComputeCapability", card),
                "busy_percent": getattr(busy, "gpu", None),
                "memory_used_bytes": getattr(memory, "used", None),
                "memory_bytes": getattr(memory, "total", None),
                "temperature_celsius": _asked(nvml, "nvmlDeviceGetTemperature", card, nvml.NVML_TEMPERATURE_GPU),
                "power_watts": None if milliwatts is None else round(milliwatts / 1000, 1),
            }
        )
    return found


def _asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """A query's answer, or None: on WSL2, in containers and on parts of a card many queries are "not supported"."""
    if arguments and arguments[0] is None:  # a card that has no handle
        return None
    try:
        value = getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# torch


def tell_torch() -> None:
    """Import torch and try every device that it sees. The processor comes before the drivers, which may hang."""
    try:
        torch = importlib.import_module("torch")  # by name: only the child runs this line
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or broken
        _emit("torch", error=_first_line(error))
        tell_cards()
        return
    _emit("torch", version=str(torch.__version__), cuda=torch.version.cuda)
    _emit("device", kind="cpu", index=0, error=_try_out(torch, "cpu"))
    tell_cards()
    if accelerator := torch.accelerator.current_accelerator():  # what torch was built for; its driver is not asked
        _tell_accelerators(torch, accelerator.type)


def _tell_accelerators(torch: Any, kind: str) -> None:
    _emit("begin", kind=kind)
    try:
        for index in range(torch.accelerator.device_count()):
            about = _described(torch, kind, index)
            _emit("device", kind=kind, index=index, **about, error=_try_out(torch, f"{kind}:{index}"))
    except (RuntimeError, AssertionError, OSError) as error:
        _emit("problem", error=_first_line(error))


def _described(torch: Any, kind: str, index: int) -> dict[str, Any]:
    if kind == "mps":
        return {"memory_bytes": torch.mps.recommended_max_memory()}
    about = torch.get_device_module(kind).get_device_properties(index)
    capability = [about.major, about.minor] if kind == "cuda" and not torch.version.hip else None
    return {"name": about.name, "memory_bytes": about.total_memory, "capability": capability,
            "driver": getattr(about, "driver_version", None)}  # fmt: skip


def _try_out(torch: Any, device: str) -> str | None:
    """Compute a small product and its gradient, the only proof that a device works. Returns its error, if any."""
    try:
        x = torch.ones(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()
        total = float(x.grad.sum())
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return _first_line(error)
    return None if total == 1024.0 else f"it computes wrongly: {total} instead of 1024"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, OSError):  # OSError: nobody reads the answer any more
        main(cards_only=sys.argv[1:] == ["cards"])
