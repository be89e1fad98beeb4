"""Checks of torch, and of each GPU that torch or the driver sees (`host/devices.py`)."""

import sys
from collections.abc import Iterator
from shlex import quote

from cuadrilla.doctor.finding import Finding, fail, ok, warn
from cuadrilla.doctor.here import Here
from cuadrilla.host.devices import HINT_SLOW, Device
from cuadrilla.messages import Message

GIB = 2**30


def torch(here: Here) -> Iterator[Finding]:
    """Torch loads, and computes on the processor."""
    cpu = here.devices[-1]
    if cpu.error:
        yield _broken(cpu.error, cpu.hint)
    else:
        yield ok(Message("PyTorch {version} computes on the processor", version=cpu.torch_version))


def gpu(here: Here) -> Iterator[Finding]:
    """Each accelerator computes; else, why it does not. No variable hides them."""
    for device in here.devices[:-1]:
        if device.error is None:
            yield ok(_described(device))
        else:
            about = {"device": device.label, "name": device.name, "error": device.error}
            yield _broken(Message("{device} {name}: {error}", **about), device.hint)
    if here.has_nvidia_driver and (value := here.environ.get("CUDA_VISIBLE_DEVICES")) in ("", "-1"):
        cause = Message("CUDA_VISIBLE_DEVICES={value} hides the NVIDIA cards", value=value)
        yield warn(cause, command="unset CUDA_VISIBLE_DEVICES")


def _broken(cause: str, hint: str) -> Finding:
    """A finding for a broken device. A hint that is a command of pip becomes one for this Python."""
    if hint.startswith("pip "):
        return fail(cause, command=f"{quote(sys.executable)} -m {hint}")
    return (warn if hint == HINT_SLOW else fail)(cause, remedy=hint)


def _described(device: Device) -> Message:
    known = {"device": device.label, "name": device.name, "gib": (device.memory_bytes or 0) / GIB}
    if device.capability is None:
        return Message("{device} {name}, {gib:.1f} GiB", **known)
    dotted = ".".join(map(str, device.capability))
    template = "{device} {name}, {gib:.1f} GiB, compute capability {capability}, driver {driver}"
    return Message(template, **known, capability=dotted, driver=device.driver)
