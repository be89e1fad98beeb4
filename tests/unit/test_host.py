"""Facts and device judgement, from recorded texts."""

import dataclasses
import json

import pytest

from cuadrilla.host import facts as facts_module
from cuadrilla.host.devices import (
    Device,
    arch_supported,
    assemble,
    cuda_build,
    install_hint,
    visible_cards,
)
from cuadrilla.host.facts import Facts, parse_container, parse_cpuinfo, parse_os_release, parse_wsl, read_facts
from cuadrilla.host.probe import ProbeAnswer, describe_exit, parse_rows

pytestmark = pytest.mark.unit

GIB = 2**30
THIS = Facts(
    system="Linux",
    system_version="Ubuntu 24.04.1 LTS",
    kernel="6.8.0",
    machine="x86_64",
    rosetta=False,
    wsl=None,
    container=None,
    processor="Ryzen 7",
    logical_cores=16,
    cpu_quota=None,
    memory_bytes=32 * GIB,
    available_bytes=20 * GIB,
    memory_limit_bytes=None,
)
MAC = dataclasses.replace(THIS, system="Darwin", machine="arm64", processor="Apple M2")
END = {"stage": "end"}
TORCH_CPU = {"stage": "torch", "version": "2.13.0+cpu", "cuda": None, "hip": None}
TORCH_CUDA = {"stage": "torch", "version": "2.13.0+cu130", "cuda": "13.0", "hip": None}
CUDA_13_ARCHES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
OLD_CARD = {
    "index": 0,
    "name": "GTX 1080",
    "uuid": "GPU-aa",
    "capability": [6, 1],
    "memory_bytes": 8 * GIB,
}
NEW_CARD = {
    "index": 1,
    "name": "RTX 4070",
    "uuid": "GPU-bb",
    "capability": [8, 9],
    "free_bytes": 11 * GIB,
}


def said(*rows: dict, fault: str | None = None, timed_out: bool = False) -> ProbeAnswer:
    return ProbeAnswer(rows=rows if fault else (*rows, END), fault=fault, timed_out=timed_out)


def seen(card: dict, *, index: int = 0, arches: list[str] = CUDA_13_ARCHES) -> dict:
    keep = {key: card[key] for key in ("name", "capability")}
    uuid = card["uuid"].removeprefix("GPU-")  # torch prints it without the prefix
    return {"stage": "device", "kind": "cuda", "index": index, "uuid": uuid, "arches": arches, "free_bytes": 1, **keep}


def trial(index: int = 0, error: str | None = None, kind: str = "cuda") -> dict:
    return {"stage": "tested", "kind": kind, "index": index, "error": error}


def driver(*cards: dict, driver: str = "580.82.07") -> dict:
    return {"driver": driver, "gpus": list(cards)}


def judged(
    torch: ProbeAnswer, nvml: dict | None = None, *, visible: str | None = None, facts: Facts = THIS
) -> list[Device]:
    devices = assemble(torch, nvml or {}, visible=visible, facts=facts)
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

    def test_os_release(self):
        assert parse_os_release('NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n') == "Ubuntu 24.04.1 LTS"
        assert parse_os_release("PRETTY_NAME=Alpine\n") == "Alpine"
        assert parse_os_release("ID=x\n") is None

    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            ({"files": ["/.dockerenv"]}, "docker"),
            ({"files": ["/run/.containerenv", "/.dockerenv"]}, "podman"),
            ({"environ": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "files": ["/.dockerenv"]}, "kubernetes"),
            ({"init_environ": "PATH=/bin\0container=lxc\0"}, "lxc"),
            ({"cgroup": "12:cpu:/docker/abc\n"}, "docker"),
            ({"cgroup": "0::/kubepods/pod1"}, "kubernetes"),
            ({"cgroup": "0::/init.scope"}, None),
        ],
    )
    def test_container(self, given, kind):
        assert parse_container(**{"environ": {}, "cgroup": "", "files": [], **given}) == kind

    def test_usable_is_the_smaller(self):
        limited = dataclasses.replace(THIS, memory_limit_bytes=4 * GIB, cpu_quota=1.5)
        assert (limited.usable_memory_bytes, limited.usable_cores) == (4 * GIB, 1.5)
        assert (THIS.usable_memory_bytes, THIS.usable_cores) == (32 * GIB, 16)
        unknown = dataclasses.replace(THIS, memory_bytes=None, logical_cores=None)
        assert (unknown.usable_memory_bytes, unknown.usable_cores) == (None, None)

    @pytest.mark.parametrize("system", ["Linux", "Darwin", "Windows", "Haiku", ""])
    def test_read_facts_never_raises_on_any_system(self, system, monkeypatch):
        monkeypatch.setattr(facts_module.platform, "system", lambda: system)
        found = read_facts()
        assert found.system == system
        assert json.loads(json.dumps(dataclasses.asdict(found)))["machine"] == found.machine


class TestDevices:
    @pytest.mark.parametrize(
        ("capability", "arches", "expected"),
        [
            ((8, 9), CUDA_13_ARCHES, True),  # binaries of sm_86 run on 8.9
            ((6, 1), CUDA_13_ARCHES, False),
            ((6, 1), ["sm_50", "sm_60", "sm_70"], True),
            ((8, 0), ["sm_86"], False),  # not downwards
            ((9, 0), ["sm_80", "sm_86"], False),  # not across major versions
            ((9, 0), ["sm_80", "compute_80"], True),  # but PTX is compiled for it
            ((10, 0), ["sm_90a"], False),
            ((9, 0), ["sm_90a"], True),
            ((12, 1), ["sm_120"], True),
            ((12, 1), ["sm_120f"], True),
            ((9, 0), [], None),
            ((9, 0), ["gfx90a", "gfx1100"], None),
        ],
    )
    def test_binary_compatibility(self, capability, arches, expected):
        assert arch_supported(capability, arches) is expected

    @pytest.mark.parametrize(
        ("visible", "expected"),
        [
            ("0,1", [0, 1]),
            ("1", [1]),
            ("GPU-b", [1]),
            ("1,GPU-aa", [1, 0]),
            ("0,7,1", [0]),  # CUDA stops at the first bad entry
            ("", []),
            ("-1", []),
            ("GPU-", []),  # ambiguous
            ("MIG-3f", None),
        ],
    )
    def test_cuda_visible_devices(self, visible, expected):
        assert visible_cards(visible, ["GPU-aa", "GPU-bb"]) == expected

    def test_builds(self):
        assert cuda_build((8, 9), "580.82") == "cu130"
        assert cuda_build((6, 1), "580.82") == "cu126"
        assert cuda_build((8, 9), "560.35.03") == "cu126"
        assert cuda_build((12, 0), "570.10") is None  # CUDA 12.6 has no kernels for Blackwell
        assert cuda_build((7, 5), "470.82") is None
        assert "update the NVIDIA driver" in install_hint((7, 5), "470.82")

    def test_a_good_card_has_no_error_and_the_drivers_free_memory(self):
        card = {**NEW_CARD, "index": 0}
        gpu, _ = judged(said(TORCH_CUDA, seen(card), trial()), driver(card))
        assert gpu == Device(
            kind="cuda",
            index=0,
            name="RTX 4070",
            free_bytes=11 * GIB,
            capability=(8, 9),
            arch_supported=True,
            driver="580.82.07",
            torch_version="2.13.0+cu130",
        )

    def test_a_card_without_kernels_is_sick_and_names_the_build_to_install(self):
        torch = said(TORCH_CUDA, seen(OLD_CARD), trial(error="no kernel image is available"))
        gpu, cpu = judged(torch, driver(OLD_CARD))
        assert gpu.arch_supported is False
        assert "no kernels for compute capability 6.1" in (gpu.error or "")
        assert "whl/cu126" in gpu.hint
        assert cpu.error is None

    def test_a_cpu_only_torch_on_a_machine_with_cards(self):
        devices = judged(said(TORCH_CPU), driver(OLD_CARD, NEW_CARD))
        assert [(gpu.index, gpu.name) for gpu in devices[:2]] == [(0, "GTX 1080"), (1, "RTX 4070")]
        assert [gpu.error for gpu in devices[:2]] == ["this PyTorch (2.13.0+cpu) is built without CUDA"] * 2
        assert "whl/cu126" in devices[0].hint
        assert "whl/cu130" in devices[1].hint

    def test_hidden_cards_are_not_listed(self):
        answers = said(TORCH_CPU), driver(OLD_CARD, NEW_CARD)
        assert [gpu.name for gpu in judged(*answers, visible="1")[:-1]] == ["RTX 4070"]
        assert judged(*answers, visible="")[:-1] == []
        assert judged(said(TORCH_CPU), {"problem": "it is lost"}, visible="-1")[:-1] == []

    def test_an_old_driver(self):
        gpu, _ = judged(said(TORCH_CUDA), driver(NEW_CARD, driver="535.104"))
        assert gpu.error == "driver 535.104 is too old for this PyTorch (CUDA 13.0 needs 580)"
        assert gpu.hint.startswith("update the NVIDIA driver, or pip install")

    def test_a_hang_in_the_second_card_keeps_the_first(self):
        torch = said(
            TORCH_CUDA,
            {"stage": "begin", "kind": "cuda"},
            seen(NEW_CARD),
            trial(),
            fault="did not answer",
            timed_out=True,
        )
        good, sick, cpu = judged(torch, driver(NEW_CARD, OLD_CARD))
        assert (good.name, good.error) == ("RTX 4070", None)
        assert (sick.name, sick.error) == ("GTX 1080", "PyTorch did not answer")
        assert cpu.error is None

    def test_a_card_that_fails_its_test(self):
        gpu, _ = judged(said(TORCH_CUDA, seen(NEW_CARD), trial(error="CUDA error: uncorrectable ECC")))
        assert gpu.error == "CUDA error: uncorrectable ECC"

    def test_a_crash_while_testing(self):
        gpu, _ = judged(said(TORCH_CUDA, seen(NEW_CARD), fault="was killed by SIGSEGV"))
        assert gpu.error == "PyTorch was killed by SIGSEGV"

    def test_only_the_drivers_failure_is_known(self):
        gpu, _ = judged(said(TORCH_CPU), {"problem": "it is lost"})
        assert (gpu.kind, gpu.error) == ("cuda", "the NVIDIA driver's library says: it is lost")

    def test_torch_is_missing(self):
        (cpu,) = judged(said({"stage": "torch", "error": "No module named 'torch'"}))
        assert cpu.error == "PyTorch cannot be loaded: No module named 'torch'"

    def test_apple(self):
        device = {"stage": "device", "kind": "mps", "index": 0, "name": None, "memory_bytes": 12 * GIB}
        good, _ = judged(said({**TORCH_CPU, "version": "2.13.0"}, device, trial(kind="mps")), facts=MAC)
        assert (good.kind, good.error, good.memory_bytes) == ("mps", None, 12 * GIB)
        assert good.name == "Apple M2"
        sick, _ = judged(said(TORCH_CPU), facts=MAC)
        assert (sick.kind, sick.hint) == ("mps", "PyTorch's MPS needs macOS 14 or newer")
        translated, _ = judged(said(TORCH_CPU), facts=dataclasses.replace(MAC, machine="x86_64", rosetta=True))
        assert translated.hint == "install an arm64 Python"


class TestProbe:
    def test_rows_survive_noise_and_half_lines(self):
        rows, garbage = parse_rows('{"stage":"torch"}\nwarning!\n[1]\n{"stage": "dev')
        assert (rows, garbage[0]) == ([{"stage": "torch"}], "warning!")
        assert parse_rows("[" * 100_000)[0] == []

    def test_exits_are_described(self):
        assert describe_exit(-11, garbage=[]) == "was killed by SIGSEGV"
        assert describe_exit(1, garbage=["x", "boom"]) == "failed with exit code 1: boom"
        assert describe_exit(0xC0000005, garbage=[]) == "failed with exit code 0xC0000005"
        assert describe_exit(0, garbage=["hola"]) == "gave an answer that cannot be read: 'hola'"
        assert describe_exit(0, garbage=[]) == "gave no complete answer"
