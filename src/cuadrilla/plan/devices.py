"""Chooses the devices of a machine that train, each with a process of its own, and their numbers of threads. Pure.

`auto` takes every accelerator that works, or the processor if there is none. A note names each device that is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cuadrilla.errors import DeviceError
from cuadrilla.host.devices import Device
from cuadrilla.messages import Message

AUTO = "auto"
SEE = "see `cuadrilla doctor`"


@dataclass(frozen=True, kw_only=True)
class Use:
    """A worker process. `device`: torch's name of the device in that process, whose environment gets the variables of
    `environment`. `name`: tells it from the machine's other workers; "" for the only one.
    """

    name: str
    device: str
    threads: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    uses: tuple[Use, ...]
    notes: tuple[Message, ...] = ()
    """The devices that were left out, and why."""


def choose_devices(
    wanted: str, found: Sequence[Device], *, cores: int, strict: bool = False, visible: str | None = None
) -> DeviceChoice:
    """`wanted`: auto, or names separated by commas. Several `cpu` share the cores.

    `found`: the result of `probe_devices`. `strict`: only devices of one kind, since bits depend on it. `visible`: this
    process's CUDA_VISIBLE_DEVICES. Raises DeviceError.
    """
    notes: tuple[Message, ...] = ()
    if wanted == AUTO:
        chosen, notes = _all_usable(found, strict=strict)
    else:
        chosen = [_named(name.strip(), found) for name in wanted.split(",")]
    labels = [device.label for device in chosen]
    if twice := next((label for label in labels if label != "cpu" and labels.count(label) > 1), ""):
        raise DeviceError("{device} is named twice", device=twice, hint="an accelerator has one worker")
    if strict and len({device.kind for device in chosen}) > 1:
        raise DeviceError("strict training needs devices of one kind", hint="or sync.strict = false")
    return DeviceChoice(uses=uses_of(labels, cores=cores, visible=visible), notes=notes)


def uses_of(labels: Sequence[str], *, cores: int, visible: str | None = None) -> tuple[Use, ...]:
    """A process for each of these devices, such as cuda:1 or cpu.

    If the processor computes, too, each accelerator gets one thread, and the `cpu` processes share the other cores.
    """
    num_cpus = labels.count("cpu")
    num_cards = len(labels) - num_cpus
    shared = max(1, (cores - num_cards) // num_cpus) if num_cpus else max(1, cores // num_cards)
    made: list[Use] = []
    for position, label in enumerate(labels):
        earlier = labels[:position].count(label)
        name = f"{label}.{earlier + 1}" if earlier else label
        kind, _, index = label.partition(":")
        threads = shared if label == "cpu" or not num_cpus else 1
        if kind == "cuda" and len(labels) > 1:  # it sees only its card, and makes no context on others
            card = visible.split(",")[int(index)].strip() if visible else index
            variables = {"CUDA_VISIBLE_DEVICES": card, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
            made.append(Use(name=name, device="cuda", threads=threads, environment=variables))
        else:
            made.append(Use(name=name if len(labels) > 1 else "", device=label, threads=threads))
    return tuple(made)


def _all_usable(found: Sequence[Device], *, strict: bool) -> tuple[list[Device], tuple[Message, ...]]:
    *accelerators, cpu = found
    usable = [device for device in accelerators if not device.error]
    broken = [device for device in accelerators if device.error]
    notes = [Message("without {device}: {error}", device=device.label, error=device.error or "") for device in broken]
    if not usable:
        return [_usable(cpu)], tuple(notes)
    if strict:
        return [device for device in usable if device.kind == usable[0].kind], tuple(notes)
    names = ",".join(device.label for device in usable)
    return usable, (*notes, Message("without the processor; --devices {names},cpu uses it", names=names))


def _named(name: str, found: Sequence[Device]) -> Device:
    wanted = f"{name}:0" if name in ("cuda", "xpu") else name
    for device in found:
        if device.label == wanted:
            return _usable(device)
    names = ", ".join(device.label for device in found)
    raise DeviceError("this machine has no device {device!r}: {names}", device=name, names=names, hint=SEE)


def _usable(device: Device) -> Device:
    if device.error:
        raise DeviceError("{device}: {error}", device=device.label, error=device.error, hint=device.hint or SEE)
    return device
