"""Facts and device judgement, from recorded texts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.host import facts as facts_module
from cuadrilla.host.devices import Device, ProbeAnswer, assemble, install_hint
from cuadrilla.host.facts import Facts, find_container, parse_cpuinfo, parse_wsl, read_facts
from cuadrilla.host.programs import json_rows
from tests.patients import FACTS, GIB

MAC = dataclasses.replace(FACTS, system="Darwin", machine="arm64", processor="Apple M2")
CPU_TEST = {"stage": "device", "kind": "cpu", "index": 0, "error": None}
TORCH_CPU = {"stage": "torch", "version": "2.13.0+cpu", "cuda": None}
TORCH_CUDA = {"stage": "torch", "version": "2.13.0+cu130", "cuda": "13.0"}
OLD_CARD = {"index": 0, "name": "GTX 1080", "capability": [6, 1], "memory_bytes": 8 * GIB}
NEW_CARD = {"index": 1, "name": "RTX 4070", "capability": [8, 9]}


def tried(card: dict[str, Any], *, error: str | None = None) -> dict[str, Any]:
    return {"stage": "device", "kind": "cuda", **card, "index": 0, "error": error}


def driver(*cards: dict[str, Any], driver: str = "580.82.07") -> dict[str, Any]:
    return {"stage": "cards", "driver": driver, "gpus": list(cards)}


def judged(
    *rows: dict[str, Any], fault: str | None = None, timed_out: bool = False, visible: str | None = None,
    facts: Facts = FACTS,
) -> list[Device]:  # fmt: skip
    said = ProbeAnswer(rows=[*rows, CPU_TEST], fault=fault, timed_out=timed_out)
    devices = assemble(said, visible=visible, facts=facts)
    assert devices[-1].kind == "cpu"
    assert [device.kind for device in devices].count("cpu") == 1
    for device in devices:
        assert (device.error is None) == (device.hint == "")
    return devices


class TestFacts:
    @pytest.mark.parametrize(
        ("kernel", "version"),
        [
            ("5.15.153.1-microsoft-standard-WSL2", 2),
            ("4.19.128-microsoft-standard", 2),
            ("6.1.0-my-own-WSL2", 2),
            ("4.4.0-19041-Microsoft", 1),
            ("6.8.0-45-generic", None),
        ],
    )
    def test_wsl(self, kernel, version):
        assert parse_wsl(kernel) == version

    @pytest.mark.parametrize(
        ("text", "name", "flags"),
        [
            ("processor\t: 0\nmodel name\t: Intel(R) Xeon(R) 8481C\nflags\t\t: fpu AVX2 amx_bf16\n" * 2,
             "Intel(R) Xeon(R) 8481C", {"fpu", "avx2", "amx_bf16"}),
            ("processor\t: 0\nFeatures\t: fp asimd evtstrm\nCPU part\t: 0xd0c\n", None, {"fp", "asimd", "evtstrm"}),
            *((rubbish, None, set()) for rubbish in ("", "rubbish", ":::\n\0", "flags")),
        ],
    )  # fmt: skip
    def test_cpuinfo(self, text, name, flags):
        assert parse_cpuinfo(text) == (name, flags)

    @pytest.mark.parametrize(
        ("environ", "files", "kind"),
        [
            ({}, [".dockerenv"], "docker"),
            ({}, ["run/.containerenv", ".dockerenv"], "podman"),
            ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [".dockerenv"], "kubernetes"),
            ({"container": "lxc"}, [], "lxc"),
            ({}, [], None),
        ],
    )
    def test_container(self, tmp_path: Path, environ, files, kind):
        (tmp_path / "run").mkdir()
        for name in files:
            (tmp_path / name).touch()
        assert find_container(environ, tmp_path) == kind

    @pytest.mark.parametrize("system", ["Linux", "Darwin", "Windows", "Haiku", ""])
    def test_read_facts_never_raises_on_any_system(self, system, monkeypatch):
        monkeypatch.setattr(facts_module.platform, "system", lambda: system)
        found = read_facts()
        assert found.system == system
        assert json.loads(json.dumps(dataclasses.asdict(found)))["machine"] == found.machine


BEGIN = {"stage": "begin", "kind": "cuda"}
NO_KERNELS = "CUDA error: no kernel image is available for execution on the device"
WITHOUT_CUDA = "this PyTorch (2.13.0+cpu) is built without CUDA"
LOST = {"stage": "cards", "problem": "it is lost"}
NO_DRIVER = {"stage": "cards", "gpus": [], "without_driver": True}
APPLE = {"stage": "device", "kind": "mps", "index": 0, "name": None, "memory_bytes": 12 * GIB}
OLD, NEW = "GTX 1080", "RTX 4070"
JUDGED: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any], list[tuple[str, str | None, str]]]] = {
    "a card without kernels": (
        (TORCH_CUDA, driver(OLD_CARD), tried(OLD_CARD, error=NO_KERNELS)), {},
        [(OLD, "PyTorch 2.13.0+cu130 has no kernels for compute capability 6.1", "whl/cu126")]),
    "a torch for processors only": (
        (TORCH_CPU, driver(OLD_CARD, NEW_CARD)), {}, [(OLD, WITHOUT_CUDA, "cu126"), (NEW, WITHOUT_CUDA, "cu130")]),
    "all cards hidden": ((TORCH_CPU, driver(OLD_CARD, NEW_CARD)), {"visible": "-1"}, []),
    "a card chosen": ((TORCH_CPU, driver(OLD_CARD, NEW_CARD)), {"visible": "1"}, []),
    "an old driver": (
        (TORCH_CUDA, driver(NEW_CARD, driver="535.104")), {},
        [(NEW, "driver 535.104 is too old for this PyTorch (CUDA 13.0 needs 580)", "update the NVIDIA driver, or")]),
    "a hang in the second card": (
        (TORCH_CUDA, driver(NEW_CARD, OLD_CARD), BEGIN, tried(NEW_CARD)),
        {"fault": "did not answer", "timed_out": True}, [(NEW, None, ""), (OLD, "PyTorch did not answer", "slow")]),
    "a crash": (
        (TORCH_CUDA, driver(NEW_CARD), BEGIN), {"fault": "was killed by SIGSEGV"},
        [(NEW, "PyTorch was killed by SIGSEGV", "pip install")]),
    "a library that fails": (
        (TORCH_CPU, LOST), {}, [("unknown", "the NVIDIA driver's library says: it is lost", "restart")]),
    "a library that fails, hidden": ((TORCH_CPU, LOST), {"visible": "-1"}, []),
    "no driver": (
        (TORCH_CPU, NO_DRIVER), {}, [("unknown", "there is an NVIDIA card, and its driver does not run", "install")]),
    "its host's card": ((TORCH_CPU, NO_DRIVER), {"facts": dataclasses.replace(FACTS, container="docker")}, []),
    "apple": (({**TORCH_CPU, "version": "2.13.0"}, APPLE), {"facts": MAC}, [("Apple M2", None, "")]),
    "an old macOS": (
        (TORCH_CPU,), {"facts": MAC},
        [("Apple M2", "PyTorch cannot use the GPU", "PyTorch's MPS needs macOS 14 or newer")]),
}  # fmt: skip


@pytest.mark.parametrize("case", JUDGED)
def test_what_is_wrong_with_an_accelerator_and_what_to_do(case: str) -> None:
    rows, options, expected = JUDGED[case]
    *found, cpu = judged(*rows, **options)
    assert [(device.name, device.error) for device in found] == [(name, error) for name, error, _ in expected]
    for device, (_, _, hint) in zip(found, expected, strict=True):
        assert hint in device.hint
    assert cpu.error is None


def test_a_good_card_and_a_torch_that_is_missing() -> None:
    gpu, _ = judged(TORCH_CUDA, driver(NEW_CARD), tried(NEW_CARD))
    assert gpu == Device(
        kind="cuda", index=0, name=NEW, capability=(8, 9), driver="580.82.07", torch_version="2.13.0+cu130"
    )  # fmt: skip
    (cpu,) = judged({"stage": "torch", "error": "No module named 'torch'"})
    assert cpu.error == "PyTorch cannot be loaded: No module named 'torch'"
    (cpu,) = judged(TORCH_CPU, {**CPU_TEST, "error": "it computes wrongly"})
    assert cpu.error == "it computes wrongly"
    assert "update the NVIDIA driver" in install_hint((7, 5), "470.82")


def test_rows_survive_noise_and_half_lines() -> None:
    assert json_rows('{"stage":"torch"}\nwarning!\n[1]\n{"stage": "dev') == [{"stage": "torch"}]
    assert json_rows("[" * 100_000) == []
