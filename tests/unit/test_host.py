"""Facts and device judgement, from recorded texts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.host import facts as facts_module
from cuadrilla.host.devices import Device, ProbeAnswer, assemble, cuda_build, install_hint
from cuadrilla.host.facts import Facts, find_container, parse_cpuinfo, parse_wsl, read_facts
from cuadrilla.host.programs import json_rows
from tests.patients import FACTS, GIB

pytestmark = pytest.mark.unit

MAC = dataclasses.replace(FACTS, system="Darwin", machine="arm64", processor="Apple M2")
CPU_TEST = {"stage": "device", "kind": "cpu", "index": 0, "error": None, "gflops": 200.0}
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
            ("6.6.87.2-microsoft-standard-WSL2+", 2),
            ("4.19.128-microsoft-standard", 2),
            ("6.1.0-my-own-WSL2", 2),
            ("4.4.0-19041-Microsoft", 1),
            ("6.8.0-45-generic", None),
            ("", None),
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


class TestDevices:
    def test_builds(self):
        assert cuda_build((8, 9), "580.82") == "cu130"
        assert cuda_build((6, 1), "580.82") == "cu126"
        assert cuda_build((8, 9), "560.35.03") == "cu126"
        assert cuda_build((12, 0), "570.10") is None  # CUDA 12.6 has no kernels for Blackwell
        assert cuda_build((7, 5), "470.82") is None
        assert "update the NVIDIA driver" in install_hint((7, 5), "470.82")

    def test_a_good_card(self):
        gpu, cpu = judged(TORCH_CUDA, driver(NEW_CARD), tried(NEW_CARD))
        assert gpu == Device(
            kind="cuda",
            index=0,
            name="RTX 4070",
            capability=(8, 9),
            driver="580.82.07",
            torch_version="2.13.0+cu130",
        )
        assert cpu.gflops == 200.0

    def test_a_card_without_kernels_names_the_build_to_install(self):
        error = "CUDA error: no kernel image is available for execution on the device"
        gpu, cpu = judged(TORCH_CUDA, driver(OLD_CARD), tried(OLD_CARD, error=error))
        assert gpu.error == "PyTorch 2.13.0+cu130 has no kernels for compute capability 6.1"
        assert "whl/cu126" in gpu.hint
        assert cpu.error is None

    def test_a_cpu_only_torch_on_a_machine_with_cards(self):
        devices = judged(TORCH_CPU, driver(OLD_CARD, NEW_CARD))
        assert [(gpu.index, gpu.name) for gpu in devices[:2]] == [(0, "GTX 1080"), (1, "RTX 4070")]
        assert [gpu.error for gpu in devices[:2]] == ["this PyTorch (2.13.0+cpu) is built without CUDA"] * 2
        assert "whl/cu126" in devices[0].hint
        assert "whl/cu130" in devices[1].hint

    @pytest.mark.parametrize("visible", ["", "-1", "1"])
    def test_hidden_cards_are_not_listed(self, visible):
        assert judged(TORCH_CPU, driver(OLD_CARD, NEW_CARD), visible=visible)[:-1] == []

    def test_an_old_driver(self):
        gpu, _ = judged(TORCH_CUDA, driver(NEW_CARD, driver="535.104"))
        assert gpu.error == "driver 535.104 is too old for this PyTorch (CUDA 13.0 needs 580)"
        assert gpu.hint.startswith("update the NVIDIA driver, or pip install")

    def test_a_hang_in_the_second_card_keeps_the_first(self):
        rows = TORCH_CUDA, driver(NEW_CARD, OLD_CARD), {"stage": "begin", "kind": "cuda"}, tried(NEW_CARD)
        good, sick, cpu = judged(*rows, fault="did not answer", timed_out=True)
        assert (good.name, good.error) == ("RTX 4070", None)
        assert (sick.name, sick.label, sick.error) == ("GTX 1080", "cuda:1", "PyTorch did not answer")
        assert cpu.error is None

    def test_a_card_that_fails_its_test(self):
        gpu, _ = judged(TORCH_CUDA, tried(NEW_CARD, error="CUDA error: uncorrectable ECC"))
        assert gpu.error == "CUDA error: uncorrectable ECC"

    def test_a_crash_while_testing(self):
        gpu, _ = judged(TORCH_CUDA, driver(NEW_CARD), {"stage": "begin", "kind": "cuda"}, fault="was killed by SIGSEGV")
        assert (gpu.name, gpu.error) == ("RTX 4070", "PyTorch was killed by SIGSEGV")

    @pytest.mark.parametrize(
        ("said", "error"),
        [
            ({"problem": "it is lost"}, "the NVIDIA driver's library says: it is lost"),
            ({"gpus": [], "without_driver": True}, "there is an NVIDIA card, and its driver does not run"),
        ],
    )
    def test_only_the_drivers_failure_is_known(self, said, error):
        row = {"stage": "cards", **said}
        gpu, _ = judged(TORCH_CPU, row)
        assert (gpu.kind, gpu.error) == ("cuda", error)
        assert judged(TORCH_CPU, row, visible="-1")[:-1] == []
        if "without_driver" in said:  # its host has the card
            assert judged(TORCH_CPU, row, facts=dataclasses.replace(FACTS, container="docker"))[:-1] == []

    def test_torch_is_missing(self):
        (cpu,) = judged({"stage": "torch", "error": "No module named 'torch'"})
        assert cpu.error == "PyTorch cannot be loaded: No module named 'torch'"

    def test_apple(self):
        device = {"stage": "device", "kind": "mps", "index": 0, "name": None, "memory_bytes": 12 * GIB}
        good, _ = judged({**TORCH_CPU, "version": "2.13.0"}, device, facts=MAC)
        assert (good.kind, good.error, good.memory_bytes) == ("mps", None, 12 * GIB)
        assert good.name == "Apple M2"
        sick, _ = judged(TORCH_CPU, facts=MAC)
        assert (sick.kind, sick.hint) == ("mps", "PyTorch's MPS needs macOS 14 or newer")
        translated, _ = judged(TORCH_CPU, facts=dataclasses.replace(MAC, machine="x86_64", rosetta=True))
        assert translated.hint == "install an arm64 Python"


def test_rows_survive_noise_and_half_lines() -> None:
    assert json_rows('{"stage":"torch"}\nwarning!\n[1]\n{"stage": "dev') == [{"stage": "torch"}]
    assert json_rows("[" * 100_000) == []
