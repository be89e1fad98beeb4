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
from dataclasses import dataclass
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
    rows = [row for row in said.all("device") if row["kind"] != "cpu"]
    found = [_device(row, said, facts, why=_why_broken(row, said)) for row in rows]
    num_seen = sum(row["kind"] == "cuda" for row in rows)
    if visible is None and (said.fault or not num_seen):  # NVML and torch order cards alike
        cards = [{**card, "kind": "cuda"} for card in said.first("cards").get("gpus", [])[num_seen:]]
        found += [_device(card, said, facts, why=_why_unseen(card, said)) for card in cards]
    if visible is None or visible.strip() not in ("", "-1"):
        found += _suspected({device.kind for device in found}, said, facts)
    cpu = {"kind": "cpu", "index": 0, "memory_bytes": facts.memory_bytes}
    return [*found, _device(cpu, said, facts, why=_why_no_torch(said))]


def _device(row: Row, said: ProbeAnswer, facts: Facts, *, why: tuple[str | None, str]) -> Device:
    """A device. One without a name of its own has the processor's. `why`: its error and its hint."""
    return Device(
        kind=row["kind"],
        index=row["index"],
        name=row.get("name") or facts.processor or facts.machine or Message("unknown"),
        memory_bytes=row.get("memory_bytes"),
        capability=_capability(row),
        driver=row.get("driver") or (said.first("cards").get("driver") if row["kind"] == "cuda" else None),
        torch_version=said.first("torch").get("version"),
        error=why[0],
        hint=why[1],
    )


def _why_no_torch(said: ProbeAnswer) -> tuple[str | None, str]:
    """Error and hint of the processor, where torch cannot be loaded at all or computes wrongly; else no error."""
    about = said.first("torch")
    if about.get("error"):
        return Message("PyTorch cannot be loaded: {reason}", reason=str(about["error"])), HINT_INSTALL
    if not about.get("version"):
        fault = said.fault or Message("said nothing")
        return Message("PyTorch {fault}", fault=fault), HINT_SLOW if said.timed_out else HINT_INSTALL
    error = next((row["error"] for row in said.all("device") if row["kind"] == "cpu"), None)
    return error, HINT_INSTALL if error else ""


def _why_broken(row: Row, said: ProbeAnswer) -> tuple[str | None, str]:
    """Error and hint of an accelerator that torch sees; no error if it computes."""
    capability, error = _capability(row), row.get("error")
    if NO_KERNELS not in str(error) or capability is None:
        return error, HINT_RESTART if error else ""
    template = "PyTorch {version} has no kernels for compute capability {capability}"
    dotted, version = f"{capability[0]}.{capability[1]}", said.first("torch").get("version")
    found = Message(template, version=version, capability=dotted)
    return found, install_hint(capability, said.first("cards").get("driver"))


def _why_unseen(card: Row, said: ProbeAnswer) -> tuple[str, str]:
    """Error and hint of a card that the driver sees and torch does not."""
    about, driver = said.first("torch"), said.first("cards").get("driver")
    version, cuda = about.get("version"), about.get("cuda")
    if said.fault or not version:
        fault = said.fault or about.get("error") or Message("is not usable")
        return Message("PyTorch {fault}", fault=fault), HINT_SLOW if said.timed_out else HINT_INSTALL
    install = install_hint(_capability(card), driver)
    if not cuda:
        return Message("this PyTorch ({version}) is built without CUDA", version=version), install
    if driver and driver_major(driver) < CUDA_13_DRIVER and str(cuda).startswith("13"):
        template = "driver {driver} is too old for this PyTorch (CUDA {cuda} needs {needed})"
        error = Message(template, driver=driver, cuda=str(cuda), needed=CUDA_13_DRIVER)
        return error, Message("update the NVIDIA driver, or {hint}", hint=install)
    return str(said.first("problem").get("error") or Message("PyTorch does not see this card")), HINT_RESTART


def _suspected(kinds: set[Kind], said: ProbeAnswer, facts: Facts) -> list[Device]:
    """The row of an accelerator of which only a failure is known."""
    cards, begun = said.first("cards"), said.first("begin").get("kind")
    cuda = {"kind": "cuda", "index": 0, "name": Message("unknown")}
    if said.fault and begun and begun not in kinds:
        why = Message("PyTorch {fault}", fault=said.fault), HINT_SLOW if said.timed_out else HINT_RESTART
        return [_device({**cuda, "kind": begun}, said, facts, why=why)]
    if "cuda" not in kinds and (problem := cards.get("problem")):
        why = Message("the NVIDIA driver's library says: {error}", error=problem), HINT_RESTART
        return [_device(cuda, said, facts, why=why)]
    if "cuda" not in kinds and cards.get("without_driver") and not facts.container:
        why = Message("there is an NVIDIA card, and its driver does not run"), HINT_DRIVER
        return [_device(cuda, said, facts, why=why)]
    if facts.system == "Darwin" and said.first("torch").get("version") and "mps" not in kinds:
        why = Message("PyTorch cannot use the GPU"), Message("PyTorch's MPS needs macOS 14 or newer")
        return [_device({"kind": "mps", "index": 0}, said, facts, why=why)]
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
