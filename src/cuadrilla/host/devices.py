"""The devices that this machine can train on, and for a broken one what is wrong and what to type.

Invariants
* `probe_devices` never raises. A child (`host/probe.py`) asks the drivers; the functions that judge are pure.
* The CPU's row always exists, and is the last. A device that cannot train is a row with `error` and `hint`.
* Indices are torch's with CUDA_DEVICE_ORDER=PCI_BUS_ID, which are also nvidia-smi's. A process that trains must set the
  same variable.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cuadrilla.host.facts import Facts, read_facts
from cuadrilla.host.probe import CHILD
from cuadrilla.host.programs import json_rows, run
from cuadrilla.messages import Message

Kind = Literal["cuda", "mps", "xpu", "cpu"]
Capability = tuple[int, int]
Row = Mapping[str, Any]

# CUDA 13 dropped Maxwell, Pascal and Volta and needs driver 580. CUDA 12.6 runs from driver 525 on and has no
# kernels for Blackwell. tools/pick_torch.py decides by the same numbers; a test holds the two together.
CUDA_13_CAPABILITY: Capability = (7, 5)
CUDA_13_DRIVER = 580
CUDA_12_DRIVER = 525
BLACKWELL: Capability = (10, 0)
NO_KERNELS = "no kernel image"  # part of CUDA's error
HINT_SLOW = Message("the first import of torch can be slow: try again with `cuadrilla doctor`")
HINT_RESTART = Message(
    "restart the machine or reinstall its driver (under WSL2: run `wsl --shutdown` in Windows first)"
)
HINT_INSTALL = "pip install --force-reinstall torch"
HINT_DRIVER = Message("install NVIDIA's driver (Ubuntu: sudo ubuntu-drivers install) for this kernel; then restart")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, working or broken. None is "unknown"; `error` is None if and only if the device can train."""

    kind: Kind
    index: int
    name: str
    memory_bytes: int | None = None
    capability: Capability | None = None  # CUDA compute capability
    driver: str | None = None
    torch_version: str | None = None
    error: str | None = None
    hint: str = ""

    @property
    def label(self) -> str:
        """The device's name in `train.device` and `--devices`."""
        return self.kind if self.kind in ("cpu", "mps") else f"{self.kind}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """The rows that the child printed, and its failure if it did not reach its end."""

    rows: Sequence[Row] = ()
    fault: str | None = None
    timed_out: bool = False

    def first(self, stage: str) -> Row:
        return next(iter(self.all(stage)), {})

    def all(self, stage: str) -> list[Row]:
        return [row for row in self.rows if row.get("stage") == stage]


def probe_devices(*, timeout_seconds: float = 20.0, argv: Sequence[str] = CHILD) -> list[Device]:
    """The devices of this machine, accelerators first. Never raises. Tests replace the child by another `argv`."""
    said = ask(argv, seconds=timeout_seconds)
    return assemble(said, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), facts=read_facts())


def ask(argv: Sequence[str], *, seconds: float) -> ProbeAnswer:
    """Run a child, and return what it printed before it ended or died."""
    said = run(argv, seconds=seconds)
    rows = json_rows(said.text)
    if rows and rows[-1].get("stage") == "end":  # a crash after that, in a driver's own clean-up, changes nothing
        return ProbeAnswer(rows=rows)
    if said.code is None:
        fault = Message("did not answer within {seconds:g} s", seconds=seconds)
        return ProbeAnswer(rows=rows, fault=fault, timed_out=True)
    if said.code < 0:
        name = signal.Signals(-said.code).name
        return ProbeAnswer(rows=rows, fault=Message("was killed by {signal}", signal=name))
    last = said.text.splitlines()[-1][:200] if said.text else ""
    return ProbeAnswer(rows=rows, fault=Message("ended with code {code}: {said!r}", code=said.code, said=last))


def assemble(said: ProbeAnswer, *, visible: str | None, facts: Facts) -> list[Device]:
    """The devices, from what the child printed; a pure function. `visible`: CUDA_VISIBLE_DEVICES."""
    driver = said.first("cards").get("driver")
    rows = [row for row in said.all("device") if row["kind"] != "cpu"]
    found = [(row, _why_broken(row, said, driver)) for row in rows]
    num_seen = sum(row["kind"] == "cuda" for row in rows)
    if visible is None and (said.fault or not num_seen):  # NVML and torch order cards alike
        cards = said.first("cards").get("gpus", [])[num_seen:]
        found += [({**card, "kind": "cuda"}, _why_unseen(said, _capability(card), driver)) for card in cards]
    devices = [_accelerator(row, said, driver=driver, chip=facts.processor, why=why) for row, why in found]
    if visible is None or visible.strip() not in ("", "-1"):
        devices += _suspected({device.kind for device in devices}, said, facts)
    return [*devices, _cpu(said, facts)]


def _cpu(said: ProbeAnswer, facts: Facts) -> Device:
    """The processor's row. If torch cannot be loaded at all, its error stands here."""
    about, hint = said.first("torch"), ""
    error = next((row["error"] for row in said.all("device") if row["kind"] == "cpu"), None)
    if about.get("error"):
        error, hint = Message("PyTorch cannot be loaded: {reason}", reason=str(about["error"])), HINT_INSTALL
    elif not about.get("version"):
        error = Message("PyTorch {fault}", fault=said.fault or Message("said nothing"))
        hint = HINT_SLOW if said.timed_out else HINT_INSTALL
    elif error:
        hint = HINT_INSTALL
    return Device(
        kind="cpu",
        index=0,
        name=facts.processor or facts.machine or Message("unknown processor"),
        memory_bytes=facts.memory_bytes,
        torch_version=about.get("version"),
        error=error,
        hint=hint,
    )


def _accelerator(
    row: Row, said: ProbeAnswer, *, driver: str | None, chip: str | None, why: tuple[str | None, str]
) -> Device:
    """The row of an accelerator. `chip`: the name of one that has none of its own. `why`: its error and its hint."""
    return Device(
        kind=row["kind"],
        index=row["index"],
        name=row.get("name") or chip or Message("unknown"),
        memory_bytes=row.get("memory_bytes"),
        capability=_capability(row),
        driver=row.get("driver") or driver,
        torch_version=said.first("torch").get("version"),
        error=why[0],
        hint=why[1],
    )


def _why_broken(row: Row, said: ProbeAnswer, driver: str | None) -> tuple[str | None, str]:
    """Error and hint of an accelerator that torch sees; no error if it computes."""
    capability, error = _capability(row), row.get("error")
    if NO_KERNELS not in str(error) or capability is None:
        return error, HINT_RESTART if error else ""
    template = "PyTorch {version} has no kernels for compute capability {capability}"
    dotted, version = f"{capability[0]}.{capability[1]}", said.first("torch").get("version")
    return Message(template, version=version, capability=dotted), install_hint(capability, driver)


def _why_unseen(said: ProbeAnswer, capability: Capability | None, driver: str | None) -> tuple[str, str]:
    """Error and hint of a card that the driver sees and torch does not."""
    about = said.first("torch")
    version, cuda = about.get("version"), about.get("cuda")
    if said.fault or not version:
        fault = said.fault or about.get("error") or Message("is not usable")
        return Message("PyTorch {fault}", fault=fault), HINT_SLOW if said.timed_out else HINT_INSTALL
    install = install_hint(capability, driver)
    if not cuda:
        return Message("this PyTorch ({version}) is built without CUDA", version=version), install
    if driver and driver_major(driver) < CUDA_13_DRIVER and str(cuda).startswith("13"):
        template = "driver {driver} is too old for this PyTorch (CUDA {cuda} needs {needed})"
        error = Message(template, driver=driver, cuda=str(cuda), needed=CUDA_13_DRIVER)
        return error, Message("update the NVIDIA driver, or {hint}", hint=install)
    return str(said.first("problem").get("error") or Message("PyTorch does not see this card")), HINT_RESTART


def _suspected(kinds: set[Kind], said: ProbeAnswer, facts: Facts) -> list[Device]:
    """The row of an accelerator of which only a failure is known."""
    version, cards = said.first("torch").get("version"), said.first("cards")
    broken = Device(kind="cuda", index=0, name=Message("unknown"), torch_version=version, hint=HINT_RESTART)
    begun = said.first("begin").get("kind")
    if said.fault and begun and begun not in kinds:
        hint = HINT_SLOW if said.timed_out else HINT_RESTART
        return [replace(broken, kind=begun, error=Message("PyTorch {fault}", fault=said.fault), hint=hint)]
    if "cuda" not in kinds and (problem := cards.get("problem")):
        return [replace(broken, error=Message("the NVIDIA driver's library says: {error}", error=problem))]
    if "cuda" not in kinds and cards.get("without_driver") and not facts.container:
        error = Message("there is an NVIDIA card, and its driver does not run")
        return [replace(broken, error=error, hint=HINT_DRIVER)]
    if facts.system == "Darwin" and version and "mps" not in kinds:
        error, hint = Message("PyTorch cannot use the GPU"), Message("PyTorch's MPS needs macOS 14 or newer")
        return [replace(broken, kind="mps", name=facts.processor or "Apple GPU", error=error, hint=hint)]
    return []


def cuda_build(capability: Capability | None, driver: str | None) -> Literal["cu126", "cu130"] | None:
    """Which of PyTorch's CUDA builds this card and driver can run; None if the driver must be updated first."""
    major = CUDA_13_DRIVER if driver is None else driver_major(driver)
    if major >= CUDA_13_DRIVER:
        return "cu126" if capability is not None and capability < CUDA_13_CAPABILITY else "cu130"
    if major < CUDA_12_DRIVER or (capability is not None and capability >= BLACKWELL):
        return None
    return "cu126"


def install_hint(capability: Capability | None, driver: str | None) -> str:
    """What to type to get a torch that runs on this card and driver."""
    build = cuda_build(capability, driver)
    if build is None:
        return Message(
            "update the NVIDIA driver ({driver}) to {needed} or newer", driver=str(driver), needed=CUDA_13_DRIVER
        )
    return f'pip install "torch==2.13.0+{build}" --index-url https://download.pytorch.org/whl/{build}'


def _capability(row: Row) -> Capability | None:
    value = row.get("capability")
    return (value[0], value[1]) if value else None


def driver_major(driver: str) -> int:
    head = driver.split(".")[0]
    return int(head) if head.isdigit() else 0
