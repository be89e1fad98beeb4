"""Checks of NVIDIA cards, their driver on both sides of WSL, and the torch that is to use them.

Sources: the CUDA on WSL User Guide (docs.nvidia.com/cuda/wsl-user-guide); texts of nvidia-smi and torch as recorded
in the tests.
"""

import os
import re
from collections.abc import Iterator

from cuadrilla.doctor.diagnosis import Diagnosis, as_root, fail, pip, warn, well
from cuadrilla.doctor.facts import PROGRAM_SECONDS, Symptoms
from cuadrilla.doctor.programs import ProgramAnswer
from cuadrilla.host.devices import HINT_SLOW, Device, install_hint
from cuadrilla.messages import Message

GIB = 2**30
SAFE_TORCH = (2, 10)
"""Earlier ones may run code that is in a weights file, `weights_only` or not (CVE-2025-32434, CVE-2026-24747)."""
NO_DEVICES = "No devices were found"
NO_DRIVER = "couldn't communicate with the NVIDIA driver"
MISMATCH = "version mismatch"
LOST = "Unknown Error"
OF_OUR_IMAGE = "this container has no NVIDIA card"
"""What stands in for nvidia-smi in the image for processors (docker/Dockerfile): no card is meant to be there."""
RESTART_WSL = "wsl --shutdown"


def torch(seen: Symptoms) -> Iterator[Diagnosis]:
    """There is one, it loads, and it is safe."""
    python = seen.installation.python
    cpu = next((device for device in seen.devices if device.kind == "cpu"), None)
    version = seen.torch_version
    if len(seen.installation.torch_copies) > 1:  # first of all: what the others would say is about the wrong one
        yield _twice(seen)
    elif cpu is not None and cpu.error and cpu.hint == HINT_SLOW:
        yield warn(cpu.error, command="cuadrilla doctor --timeout 120")
    elif cpu is not None and cpu.error:
        yield fail(cpu.error, command=pip("install --force-reinstall torch", python=python), fixable=True)
    elif version and (number := version_of(version)) and number < SAFE_TORCH:
        yield fail(
            Message("PyTorch {version} is older than {safe}, the first that is safe", version=version, safe="2.10"),
            remedy=Message("a weights file made for the purpose can run programs in older ones"),
            command=pip(_newer(seen, version), python=python),
            fixable=True,
        )
    elif version:
        yield well(Message("PyTorch {version}", version=version))


def _twice(seen: Symptoms) -> Diagnosis:
    """Python takes the first one. Pip does not remove what is outside its environment."""
    (first, folder), (second, other) = seen.installation.torch_copies[:2]
    cause = Message(
        "PyTorch is installed twice: {first} in {folder}, which Python takes, and {second} in {other}",
        first=first,
        folder=folder,
        second=second,
        other=other,
    )
    added = [part.rstrip("/") for part in seen.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if folder.rstrip("/") in added:
        return fail(cause, command="unset PYTHONPATH")
    remedy = Message("remove the first one, then look again")
    return fail(cause, remedy=remedy, command=pip("uninstall -y torch", python=seen.installation.python))


def version_of(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _newer(seen: Symptoms, version: str) -> str:
    """For the card, if there is one: the index of an old CUDA has no new torch."""
    card = next((device for device in seen.devices if device.kind == "cuda" and device.capability), None)
    if card is not None and (hint := install_hint(card.capability, card.driver)).startswith("pip "):
        return hint.removeprefix("pip ")
    index = " --index-url https://download.pytorch.org/whl/cpu" if version.endswith("+cpu") else ""
    return f'install "torch>=2.10"{index}'


def cards(seen: Symptoms) -> Iterator[Diagnosis]:
    """Each accelerator: it computes, or why it does not."""
    for device in seen.devices:
        if device.kind == "cpu":
            continue
        if device.error is None:
            yield well(_described(device))
            continue
        cause = Message("{device} {name}: {error}", device=device.label, name=device.name, error=device.error)
        if device.hint == HINT_SLOW:
            yield warn(cause, command="cuadrilla doctor --timeout 120")
        elif device.hint.startswith("pip "):
            command = pip(device.hint.removeprefix("pip "), python=seen.installation.python)
            yield fail(cause, command=command, fixable=True)
        else:
            yield fail(cause, remedy=device.hint)


def _described(device: Device) -> Message:
    gib = (device.memory_bytes or 0) / GIB
    if device.capability is None:
        return Message("{device} {name}, {gib:.1f} GiB", device=device.label, name=device.name, gib=gib)
    return Message(
        "{device} {name}, {gib:.1f} GiB, compute capability {capability}",
        device=device.label,
        name=device.name,
        gib=gib,
        capability=f"{device.capability[0]}.{device.capability[1]}",
    )


def hidden(seen: Symptoms) -> Iterator[Diagnosis]:
    """A variable that hides cards which are there."""
    value = seen.environ.get("CUDA_VISIBLE_DEVICES")
    smi = seen.nvidia.smi
    if value is not None and value.strip() in ("", "-1") and smi is not None and smi.ok and smi.text:
        name = smi.text.splitlines()[0].partition(",")[0]
        yield warn(
            Message("CUDA_VISIBLE_DEVICES={value} hides {name}", value=repr(value), name=name),
            command="unset CUDA_VISIBLE_DEVICES",
        )


def driver(seen: Symptoms) -> Iterator[Diagnosis]:
    """What nvidia-smi says when it does not list cards."""
    smi = seen.nvidia.smi
    if smi is None or (smi.ok and NO_DEVICES not in smi.text) or OF_OUR_IMAGE in smi.text:
        return
    if smi.code is None:
        yield _hangs(seen)
    elif NO_DEVICES in smi.text:
        yield _no_devices(seen, smi)
    elif MISMATCH in smi.text:
        yield fail(
            Message("the NVIDIA driver was updated, and the old one still runs (nvidia-smi: {said})", said=_line(smi)),
            command=_restart(seen),
            shell="powershell" if seen.host.wsl else "here",
        )
    elif LOST in smi.text and seen.host.container:
        yield fail(
            Message("the card has vanished from this container (nvidia-smi: {said})", said=_line(smi)),
            remedy=Message("it comes back when the container is started again"),
            command="docker restart NAME",
            shell="host",
        )
    elif NO_DRIVER in smi.text and not seen.host.wsl:
        yield fail(
            Message("the NVIDIA driver is not loaded (nvidia-smi: {said})", said=_line(smi)),
            remedy=Message("after an update of the kernel the driver must be built for it; then restart"),
            command=as_root(
                "ubuntu-drivers install" if "Ubuntu" in (seen.host.system_version or "") else "dkms autoinstall",
                is_root=seen.is_root,
            ),
        )
    else:
        yield fail(
            Message("nvidia-smi fails: {said}", said=_line(smi)),
            command=_restart(seen),
            shell="powershell" if seen.host.wsl else "here",
        )


def _line(answer: ProgramAnswer) -> str:
    """The first one."""
    return next((line.strip() for line in answer.text.splitlines() if line.strip()), "")[:160]


def _hangs(seen: Symptoms) -> Diagnosis:
    cause = Message("nvidia-smi does not answer within {seconds:g} s: the driver hangs", seconds=PROGRAM_SECONDS)
    return fail(cause, command=_restart(seen), shell="powershell" if seen.host.wsl else "here")


def _restart(seen: Symptoms) -> str:
    return RESTART_WSL if seen.host.wsl else as_root("reboot", is_root=seen.is_root)


def _no_devices(seen: Symptoms, smi: ProgramAnswer) -> Diagnosis:
    windows = seen.nvidia.windows_smi
    if seen.host.wsl and windows is not None and windows.ok and NO_DEVICES not in windows.text:
        return fail(
            Message("Windows has {name}, and WSL does not see it", name=_line(windows).partition(",")[0]),
            remedy=Message("WSL was started before the driver was there; this ends all that runs in WSL"),
            command=RESTART_WSL,
            shell="powershell",
        )
    return fail(
        Message("nvidia-smi finds no card: {said}", said=_line(smi)),
        remedy=Message("is it in its slot, with power, and switched on in the BIOS?"),
        command="nvidia-smi.exe" if seen.host.wsl else "lspci -nn -d 10de:",
    )


def wsl_driver(seen: Symptoms) -> Iterator[Diagnosis]:
    """Under WSL the driver is Windows': a Linux one hides it."""
    if not seen.host.wsl:
        return
    programs = seen.nvidia
    if programs.driver_packages:
        names = " ".join(programs.driver_packages)
        yield fail(
            Message("a Linux driver is installed in WSL and hides Windows' own: {packages}", packages=names),
            remedy=Message("afterwards, in PowerShell: wsl --shutdown"),
            command=as_root(f"apt-get purge -y {names}", is_root=seen.is_root),
        )
    windows = programs.windows_smi
    if windows is not None and windows.ok and NO_DEVICES not in windows.text and programs.smi is None:
        yield fail(
            Message("Windows has {name}, and this WSL lends no cards", name=_line(windows).partition(",")[0]),
            command="wsl --shutdown" if programs.has_dxg else "wsl --update",
            shell="powershell",
        )
    if programs.smi_off_path and programs.smi is not None and programs.smi.ok:
        yield warn(
            Message("nvidia-smi is not on this user's PATH"),
            command="export PATH=$PATH:/usr/lib/wsl/lib",
        )
