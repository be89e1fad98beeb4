"""Which devices this machine can train on, and for a sick one what is wrong and what to type.

Invariants
* `probe_devices` never raises; the asking is `host/probe.py`, the judging here is pure.
* The CPU's row always exists, and is the last. A device that cannot train is a row with `error` and `hint`.
* Indices are torch's under CUDA_VISIBLE_DEVICES with CUDA_DEVICE_ORDER=PCI_BUS_ID. Without that order CUDA sorts by
  speed and its indices disagree with nvidia-smi's; a process that trains must set the same.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from cuadrilla.host.facts import Facts, read_facts
from cuadrilla.host.gpus import NVML_CHILD, NvmlChild, has_driver
from cuadrilla.host.probe import CHILD, ProbeAnswer, Row, ask
from cuadrilla.messages import Message

Kind = Literal["cuda", "mps", "xpu", "cpu"]
Capability = tuple[int, int]

# CUDA 13 dropped Maxwell, Pascal and Volta and needs driver 580. CUDA 12.6 runs from driver 525 on and has no
# kernels for Blackwell. tools/pick_torch.py decides by the same numbers; a test holds the two together.
CUDA_13_CAPABILITY: Capability = (7, 5)
CUDA_13_DRIVER = 580
CUDA_12_DRIVER = 525
BLACKWELL: Capability = (10, 0)
HINT_SLOW = Message("the first import of torch can be slow: try again with `cuadrilla doctor --timeout 120`")
HINT_RESTART = Message(
    "restart the machine or reinstall its driver (under WSL2: run `wsl --shutdown` in Windows first)"
)
HINT_INSTALL = Message("install it again: pip install --force-reinstall torch")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, well or sick. None is "unknown"; `error` is None if and only if the device can train."""

    kind: Kind
    index: int
    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    capability: Capability | None = None  # CUDA compute capability
    arch_supported: bool | None = None  # the installed torch has kernels for it
    driver: str | None = None
    torch_version: str | None = None
    gflops: float | None = None  # of a product of matrices, in fp32 or bf16, whichever is faster
    error: str | None = None
    hint: str = ""

    @property
    def label(self) -> str:
        """What `train.device` and `--devices` call it."""
        return self.kind if self.kind in ("cpu", "mps") else f"{self.kind}:{self.index}"


def probe_devices(
    *, timeout_seconds: float = 20.0, torch_argv: Sequence[str] = CHILD, nvml_argv: Sequence[str] | None = None
) -> list[Device]:
    """The devices of this machine, accelerators first. Never raises; the argvs replace the two children in tests."""
    child = NvmlChild(nvml_argv or NVML_CHILD) if nvml_argv or has_driver() else None
    with ThreadPoolExecutor(1) as pool:  # both have limits
        torch = pool.submit(ask, torch_argv, seconds=timeout_seconds)
        nvml = child.ask() if child is not None else {}
    if child is not None:
        child.close()
    return assemble(torch.result(), nvml, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), facts=read_facts())


def assemble(torch: ProbeAnswer, nvml: Row, *, visible: str | None, facts: Facts) -> list[Device]:
    """Pure: the devices from what the two children said."""
    version = torch.first("torch").get("version")
    driver = nvml.get("driver")
    cards = _visible_rows(nvml.get("gpus", []), visible)
    by_uuid = {_uuid(card): card for card in cards}
    devices = [
        _reported(row, torch, card=by_uuid.get(_uuid(row), {}), driver=driver, chip=facts.processor)
        for row in torch.all("device")
    ]
    if torch.fault or not any(device.kind == "cuda" for device in devices):
        seen = {_uuid(row) for row in torch.all("device")}
        left = [(index, card) for index, card in enumerate(cards) if _uuid(card) not in seen]
        devices += [_unseen(card, index, torch, driver=driver) for index, card in left]
    if visible is None or visible.strip() not in ("", "-1"):
        devices += _phantoms(devices, torch, nvml.get("problem"), facts)
    error, hint = _import_problem(torch)
    speed = next((test.get("gflops") for test in torch.all("tested") if test.get("kind") == "cpu"), None)
    cpu = Device(
        kind="cpu",
        index=0,
        name=facts.processor or facts.machine or Message("unknown processor"),
        memory_bytes=facts.usable_memory_bytes,
        free_bytes=facts.available_bytes,
        torch_version=version,
        gflops=speed,
        error=error,
        hint=hint,
    )
    return [*devices, cpu]


def _reported(row: Row, torch: ProbeAnswer, *, card: Row, driver: str | None, chip: str | None) -> Device:
    """A device that torch sees: is it supported, and did it pass its test?"""
    kind: Kind = row["kind"]
    index = row["index"]
    version = torch.first("torch").get("version")
    capability = _capability(row.get("capability"))
    arches = row.get("arches") or []
    supported = arch_supported(capability, arches) if capability else None
    tests = [test for test in torch.all("tested") if (test.get("kind"), test.get("index")) == (kind, index)]
    error: str | None = None
    hint = ""
    if supported is False and capability:
        error = Message(
            "PyTorch {version} has no kernels for compute capability {capability} ({kernels})",
            version=version,
            capability=_dotted(capability),
            kernels=", ".join(arches),
        )
        hint = install_hint(capability, driver)
    elif not tests:
        error = Message("PyTorch {fault}", fault=torch.fault or Message("did not test it"))
        hint = HINT_SLOW if torch.timed_out else HINT_RESTART
    elif tests[0].get("error"):
        error, hint = str(tests[0]["error"]), HINT_RESTART
    free = card.get("free_bytes")  # NVML's figure does not count the child's own context
    return Device(
        kind=kind,
        index=index,
        name=row.get("name") or (kind == "mps" and chip) or Message("unknown"),
        memory_bytes=row.get("memory_bytes"),
        free_bytes=row.get("free_bytes") if free is None else free,
        capability=capability,
        arch_supported=supported,
        driver=driver if kind == "cuda" else row.get("driver"),
        torch_version=version,
        gflops=tests[0].get("gflops") if tests else None,
        error=error,
        hint=hint,
    )


def _unseen(card: Row, index: int, torch: ProbeAnswer, *, driver: str | None) -> Device:
    """A card that the driver sees and torch does not: say why."""
    about = torch.first("torch")
    version = about.get("version")
    capability = _capability(card.get("capability"))
    error: str = Message("PyTorch does not see this card")
    hint: str = Message("look at what `python -c 'import torch; torch.zeros(1).cuda()'` says")
    if torch.fault or not version:
        fault = torch.fault or about.get("error") or Message("is not usable")
        error = Message("PyTorch {fault}", fault=fault)
        hint = HINT_SLOW if torch.timed_out else HINT_INSTALL
    elif not about.get("cuda"):
        error = Message("this PyTorch ({version}) is built without CUDA", version=version)
        hint = install_hint(capability, driver)
    elif driver and driver_major(driver) < CUDA_13_DRIVER and str(about["cuda"]).startswith("13"):
        error = Message(
            "driver {driver} is too old for this PyTorch (CUDA {cuda} needs {needed})",
            driver=driver,
            cuda=str(about["cuda"]),
            needed=CUDA_13_DRIVER,
        )
        hint = Message("update the NVIDIA driver, or {hint}", hint=install_hint(capability, driver))
    elif torch.first("problem").get("error"):
        error = str(torch.first("problem")["error"])
        hint = HINT_RESTART
    return Device(
        kind="cuda",
        index=index,
        name=card.get("name") or Message("unknown"),
        memory_bytes=card.get("memory_bytes"),
        free_bytes=card.get("free_bytes"),
        capability=capability,
        driver=driver,
        torch_version=version,
        error=error,
        hint=hint,
    )


def _phantoms(known: Sequence[Device], torch: ProbeAnswer, problem: str | None, facts: Facts) -> list[Device]:
    """A row for an accelerator of which only a failure is known; `problem`: of the NVIDIA driver's library."""
    version = torch.first("torch").get("version")
    kinds = {device.kind for device in known}
    begun = [row.get("kind") for row in torch.all("begin")]
    unknown = Device(kind="cuda", index=0, name=Message("unknown"), torch_version=version, hint=HINT_RESTART)
    if torch.fault and begun and begun[-1] in ("cuda", "mps", "xpu") and begun[-1] not in kinds:
        hint = HINT_SLOW if torch.timed_out else HINT_RESTART
        error = Message("PyTorch {fault}", fault=torch.fault)
        return [replace(unknown, kind=begun[-1], error=error, hint=hint)]
    if problem and "cuda" not in kinds:
        return [replace(unknown, error=Message("the NVIDIA driver's library says: {error}", error=problem))]
    if facts.system == "Darwin" and version and "mps" not in kinds and (facts.rosetta or facts.machine == "arm64"):
        error = Message(
            "this Python is an Intel build, translated by Rosetta" if facts.rosetta else "PyTorch cannot use the GPU"
        )
        hint = Message("install an arm64 Python" if facts.rosetta else "PyTorch's MPS needs macOS 14 or newer")
        return [replace(unknown, kind="mps", name=facts.processor or "Apple GPU", error=error, hint=hint)]
    return []


def _import_problem(torch: ProbeAnswer) -> tuple[str | None, str]:
    """Why torch cannot be used at all, CPU included; (None, "") if it can."""
    about = torch.first("torch")
    if about.get("version"):
        return None, ""
    if about.get("error"):
        return Message("PyTorch cannot be loaded: {reason}", reason=str(about["error"])), HINT_INSTALL
    error = Message("PyTorch {fault}", fault=torch.fault or Message("said nothing"))
    return error, HINT_SLOW if torch.timed_out else HINT_INSTALL


def arch_supported(capability: Capability, arches: Sequence[str]) -> bool | None:
    """Can a build with these kernels (`torch.cuda.get_arch_list()`) run on this card? None if it cannot be told.

    Machine code for sm_86 runs on 8.6 and later minor versions of 8; `sm_90a` on 9.0 alone, `sm_120f` on its family;
    PTX (`compute_80`) is compiled for any later card at start. ROCm's list (gfx...) is not judged.
    """
    major, minor = capability
    understood = False
    for arch in arches:
        family, _, number = arch.partition("_")
        digits, suffix = number.rstrip("af"), number[len(number.rstrip("af")) :]
        if family not in ("sm", "compute") or not digits.isdigit() or len(digits) < 2:
            continue
        understood = True
        have = (int(digits[:-1]), int(digits[-1]))
        if suffix == "a":
            fits = have == capability
        elif family == "compute" and not suffix:
            fits = have <= capability
        else:
            fits = have[0] == major and have[1] <= minor
        if fits:
            return True
    return False if understood else None


def cuda_build(capability: Capability | None, driver: str | None) -> Literal["cu126", "cu130"] | None:
    """Which of PyTorch's CUDA builds this card and driver can run; None if the driver must be updated first."""
    major = CUDA_13_DRIVER if driver is None else driver_major(driver)
    if major >= CUDA_13_DRIVER:
        return "cu126" if capability is not None and capability < CUDA_13_CAPABILITY else "cu130"
    if major < CUDA_12_DRIVER or (capability is not None and capability >= BLACKWELL):
        return None
    return "cu126"


def install_hint(capability: Capability | None, driver: str | None) -> str:
    """What to type to get a torch for this card and driver."""
    build = cuda_build(capability, driver)
    if build is None:
        return Message(
            "update the NVIDIA driver ({driver}) to {needed} or newer", driver=str(driver), needed=CUDA_13_DRIVER
        )
    return f'pip install "torch==2.13.0+{build}" --index-url https://download.pytorch.org/whl/{build}'


def visible_cards(visible: str, uuids: Sequence[str]) -> list[int] | None:
    """Positions that CUDA_VISIBLE_DEVICES leaves, in its order; None if it cannot be told (MIG slices).

    CUDA stops at the first entry that names no card, so that `-1` and the empty string hide everything.
    """
    found: list[int] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            return None
        if name.isdigit():
            matches = [int(name)] if int(name) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(matches) != 1:
            break
        found.append(matches[0])
    return found


def _visible_rows(cards: list[Row], visible: str | None) -> list[Row]:
    if visible is None:
        return cards
    chosen = visible_cards(visible, [str(card.get("uuid")) for card in cards])
    return [cards[index] for index in chosen if index < len(cards)] if chosen is not None else []


def _uuid(row: Row) -> str:
    return str(row.get("uuid") or "").removeprefix("GPU-").lower()


def _capability(value: Sequence[int] | None) -> Capability | None:
    return (value[0], value[1]) if value else None


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def driver_major(driver: str) -> int:
    head = driver.split(".")[0]
    return int(head) if head.isdigit() else 0
