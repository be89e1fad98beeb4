"""Checks of NVIDIA cards, their driver on both sides of WSL, and the torch that is to use them.

Sources: the CUDA on WSL User Guide (docs.nvidia.com/cuda/wsl-user-guide); texts of nvidia-smi and torch as recorded
in the tests.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cuadrilla.doctor.diagnosis import Diagnosis, Shell, fail, ok, pip, warn
from cuadrilla.doctor.here import PROGRAM_SECONDS, Here
from cuadrilla.host.devices import HINT_SLOW, Device, install_hint
from cuadrilla.host.programs import ProgramAnswer
from cuadrilla.messages import Message

GIB = 2**30
SAFE_TORCH = (2, 10)
"""Earlier ones may run code that is in a weights file, `weights_only` or not (CVE-2025-32434, CVE-2026-24747)."""
QUERY = ("--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
WSL_NVIDIA_SMI = "/usr/lib/wsl/lib/nvidia-smi"
"""It is not on root's PATH."""
NO_DEVICES = "No devices were found"
NO_DRIVER = "couldn't communicate with the NVIDIA driver"
MISMATCH = "version mismatch"
LOST = "Unknown Error"
OF_OUR_IMAGE = "this container has no NVIDIA card"
"""What stands in for nvidia-smi in the image for processors (docker/nvidia-smi): no card is meant to be there."""
SLOW_COMMAND = "cuadrilla doctor --timeout 120"


def torch_copies() -> list[tuple[str, str]]:
    """(version, folder) of each installed torch, the one that Python imports first."""
    found = importlib.metadata.distributions(name="torch")
    return list(dict.fromkeys((each.version, str(each.locate_file(""))) for each in found))


def torch(here: Here, *, copies: Callable[[], Sequence[tuple[str, str]]] = torch_copies) -> Iterator[Diagnosis]:
    """There is one, it loads, and it is safe."""
    installed = copies()
    if len(installed) > 1:  # first of all: what the others would say is about the wrong one
        yield _twice(here, installed)
        return
    cpu = next((device for device in here.devices() if device.kind == "cpu"), None)
    version = next((device.torch_version for device in here.devices() if device.torch_version), None)
    if cpu is not None and cpu.error and cpu.hint == HINT_SLOW:
        yield warn(cpu.error, command=SLOW_COMMAND)
    elif cpu is not None and cpu.error:
        yield fail(cpu.error, command=pip("install --force-reinstall torch", python=sys.executable))
    elif version and (number := re.match(r"(\d+)\.(\d+)", version)) and tuple(map(int, number.groups())) < SAFE_TORCH:
        yield fail(
            Message("PyTorch {version} is older than {safe}, the first that is safe", version=version, safe="2.10"),
            remedy=Message("a weights file made for the purpose can run programs in older ones"),
            command=pip(_newer(here, version), python=sys.executable),
        )
    elif version:
        yield ok(Message("PyTorch {version}", version=version))


def _twice(here: Here, copies: Sequence[tuple[str, str]]) -> Diagnosis:
    """Python takes the first one. Pip does not remove what is outside its environment."""
    (first, folder), (second, other) = copies[:2]
    cause = Message(
        "PyTorch is installed twice: {first} in {folder}, which Python takes, and {second} in {other}",
        first=first,
        folder=folder,
        second=second,
        other=other,
    )
    added = [part.rstrip("/") for part in here.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if folder.rstrip("/") in added:
        return fail(cause, command="unset PYTHONPATH")
    remedy = Message("remove the first one, then look again")
    return fail(cause, remedy=remedy, command=pip("uninstall -y torch", python=sys.executable))


def _newer(here: Here, version: str) -> str:
    """For the card, if there is one: the index of an old CUDA has no new torch."""
    card = next((device for device in here.devices() if device.kind == "cuda" and device.capability), None)
    if card is not None and (hint := install_hint(card.capability, card.driver)).startswith("pip "):
        return hint.removeprefix("pip ")
    index = " --index-url https://download.pytorch.org/whl/cpu" if version.endswith("+cpu") else ""
    return f'install "torch>=2.10"{index}'


def cards(here: Here) -> Iterator[Diagnosis]:
    """Each accelerator: it computes, or why it does not."""
    for device in here.devices():
        if device.kind == "cpu":
            continue
        if device.error is None:
            yield ok(_described(device))
            continue
        cause = Message("{device} {name}: {error}", device=device.label, name=device.name, error=device.error)
        if device.hint == HINT_SLOW:
            yield warn(cause, command=SLOW_COMMAND)
        elif device.hint.startswith("pip "):
            yield fail(cause, command=pip(device.hint.removeprefix("pip "), python=sys.executable))
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


def smi(here: Here) -> ProgramAnswer | None:
    """What nvidia-smi says; None where there is none."""
    return here.run("nvidia-smi", *QUERY) or (here.run(WSL_NVIDIA_SMI, *QUERY) if here.host.wsl else None)


def windows_card(here: Here) -> str:
    """The name of the card that Windows has; "" without WSL or a card."""
    said = here.run("nvidia-smi.exe", *QUERY) if here.host.wsl else None
    return _line(said).partition(",")[0] if said is not None and said.ok and NO_DEVICES not in said.text else ""


def hidden(here: Here) -> Iterator[Diagnosis]:
    """A variable that hides cards which are there."""
    value, said = here.environ.get("CUDA_VISIBLE_DEVICES"), smi(here)
    if value is not None and value.strip() in ("", "-1") and said is not None and said.ok and said.text:
        name = _line(said).partition(",")[0]
        cause = Message("CUDA_VISIBLE_DEVICES={value} hides {name}", value=repr(value), name=name)
        yield warn(cause, command="unset CUDA_VISIBLE_DEVICES")


def driver(here: Here) -> Iterator[Diagnosis]:
    """What nvidia-smi says when it does not list cards."""
    said = smi(here)
    if said is None or (said.ok and NO_DEVICES not in said.text) or OF_OUR_IMAGE in said.text:
        return
    shell: Shell = "powershell" if here.host.wsl else "here"
    restart = "wsl --shutdown" if here.host.wsl else here.as_root("reboot")
    if said.code is None:
        cause = Message("nvidia-smi does not answer within {seconds:g} s: the driver hangs", seconds=PROGRAM_SECONDS)
        yield fail(cause, command=restart, shell=shell)
    elif NO_DEVICES in said.text:
        yield _no_devices(here, said)
    elif MISMATCH in said.text:
        cause = Message(
            "the NVIDIA driver was updated, and the old one still runs (nvidia-smi: {said})", said=_line(said)
        )
        yield fail(cause, command=restart, shell=shell)
    elif LOST in said.text and here.host.container:
        cause = Message("the card has vanished from this container (nvidia-smi: {said})", said=_line(said))
        remedy = Message("it comes back when the container is started again")
        yield fail(cause, remedy=remedy, command="docker restart NAME", shell="host")
    elif NO_DRIVER in said.text and not here.host.wsl:
        is_ubuntu = "Ubuntu" in (here.host.system_version or "")
        yield fail(
            Message("the NVIDIA driver is not loaded (nvidia-smi: {said})", said=_line(said)),
            remedy=Message("after an update of the kernel the driver must be built for it; then restart"),
            command=here.as_root("ubuntu-drivers install" if is_ubuntu else "dkms autoinstall"),
        )
    else:
        yield fail(Message("nvidia-smi fails: {said}", said=_line(said)), command=restart, shell=shell)


def _line(answer: ProgramAnswer) -> str:
    """The first one."""
    return next((line.strip() for line in answer.text.splitlines() if line.strip()), "")[:160]


def _no_devices(here: Here, said: ProgramAnswer) -> Diagnosis:
    if name := windows_card(here):
        return fail(
            Message("Windows has {name}, and WSL does not see it", name=name),
            remedy=Message("WSL was started before the driver was there; this ends all that runs in WSL"),
            command="wsl --shutdown",
            shell="powershell",
        )
    return fail(
        Message("nvidia-smi finds no card: {said}", said=_line(said)),
        remedy=Message("is it in its slot, with power, and switched on in the BIOS?"),
        command="nvidia-smi.exe" if here.host.wsl else "lspci -nn -d 10de:",
    )


def wsl_driver(here: Here, *, device: Path = Path("/dev/dxg")) -> Iterator[Diagnosis]:
    """Under WSL the driver is Windows': a Linux one hides it."""
    if not here.host.wsl:
        return
    listed = here.run("dpkg-query", "-W", "-f=${db:Status-Abbrev}${Package}\n", "nvidia-driver-*",
                      "libnvidia-compute-*", "cuda-drivers*")  # fmt: skip
    if packages := sorted(re.findall(r"^ii\s+([a-z0-9][a-z0-9+.-]+)$", listed.text if listed else "", re.MULTILINE)):
        names = " ".join(packages)
        yield fail(
            Message("a Linux driver is installed in WSL and hides Windows' own: {packages}", packages=names),
            remedy=Message("afterwards, in PowerShell: wsl --shutdown"),
            command=here.as_root(f"apt-get purge -y {names}"),
        )
    said = smi(here)
    if said is None and (name := windows_card(here)):
        yield fail(
            Message("Windows has {name}, and this WSL lends no cards", name=name),
            command="wsl --shutdown" if device.exists() else "wsl --update",
            shell="powershell",
        )
    if said is not None and said.ok and here.run("nvidia-smi", *QUERY) is None:
        yield warn(Message("nvidia-smi is not on this user's PATH"), command="export PATH=$PATH:/usr/lib/wsl/lib")
