"""Which build of torch is chosen for which machine. The remedies that the package prints must name the same builds."""

import itertools

import pytest

from cuadrilla.host.devices import cuda_build
from pick_torch import Choice, Gpu, Refusal, choose, parse_gpus, prefer_configured

WHEELS = "https://download.pytorch.org/whl/"
GTX_1080 = Gpu("NVIDIA GeForce GTX 1080", (6, 1))
V100 = Gpu("Tesla V100", (7, 0))
RTX_2080 = Gpu("NVIDIA GeForce RTX 2080", (7, 5))
RTX_4070 = Gpu("NVIDIA GeForce RTX 4070", (8, 9))
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", (12, 0))


def chosen(*gpus: Gpu, driver: str | None = "580.82.07", os_name: str = "Linux", machine: str = "x86_64") -> Choice:
    return choose(os_name, machine, gpus, driver if gpus else None, (3, 12))


@pytest.mark.parametrize(("os_name", "machine"), [("Linux", "x86_64"), ("Linux", "aarch64"), ("Windows", "AMD64")])
def test_without_a_gpu_the_cpu_build(os_name, machine):
    choice = chosen(os_name=os_name, machine=machine)
    assert (choice.requirement, choice.index_url) == ("torch==2.13.0+cpu", WHEELS + "cpu")
    assert choice.arguments == ["torch==2.13.0+cpu", "--index-url", WHEELS + "cpu", "--no-deps"]


def test_a_cpu_wheel_that_pip_already_knows_needs_no_index():
    choice = prefer_configured(chosen(), offered=True)
    assert choice.arguments == ["torch==2.13.0+cpu", "--no-deps"]
    assert prefer_configured(chosen(), offered=False) == chosen()


@pytest.mark.parametrize(
    ("gpus", "driver", "build", "reason"),
    [
        ([RTX_4070], "580.82.07", "cu130", ""),
        ([GTX_1080], "580.82.07", "cu126", "GTX 1080, compute capability 6.1: CUDA 13 has no kernels"),
        ([RTX_4070], "560.35.03", "cu126", "driver 560.35.03: CUDA 13 needs driver 580"),
        ([RTX_4070, GTX_1080], "580.82.07", "cu126", ""),  # the one build that serves both
        ([RTX_5090, GTX_1080], "580.82.07", "cu130", "stays unused"),  # none serves both: the better card
        ([RTX_4070], "470.82", "cpu", "update it"),
        ([RTX_5090], "570.10", "cpu", ""),  # CUDA 12.6 has no kernels for it
        ([RTX_4070], None, "cu130", ""),
    ],
)
@pytest.mark.parametrize("os_name", ["Linux", "Windows"])
def test_gpus(gpus, driver, build, reason, os_name):
    choice = chosen(*gpus, driver=driver, os_name=os_name)
    assert (choice.requirement, choice.index_url) == (f"torch==2.13.0+{build}", WHEELS + build)
    assert "--extra-index-url" not in choice.arguments
    assert reason in choice.reason


def test_macs():
    choice = chosen(os_name="Darwin", machine="arm64")
    assert choice.arguments == ["torch==2.13.0"]
    with pytest.raises(Refusal, match="Intel Mac"):
        chosen(os_name="Darwin", machine="x86_64")


@pytest.mark.parametrize(("os_name", "machine"), [("FreeBSD", "amd64"), ("Linux", "riscv64"), ("Windows", "ARM64")])
def test_machines_without_a_torch(os_name, machine):
    with pytest.raises(Refusal, match="no torch"):
        chosen(os_name=os_name, machine=machine)


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_pythons_without_a_torch(version):
    with pytest.raises(Refusal, match=r"outside 3\.11 to 3\.14"):
        choose("Linux", "x86_64", [], None, version)


def test_nvidia_smi_output():
    text = "NVIDIA GeForce GTX 1080, 6.1, 580.82.07\nOdd, name, 8.9, 580.82.07\n[N/A], [N/A], [N/A]\nfailed\n"
    assert parse_gpus(text) == ([GTX_1080, Gpu("Odd, name", (8, 9))], "580.82.07")
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the driver") == ([], None)


def test_the_packages_hints_name_the_same_builds():
    drivers = ["470.82", "525.60", "560.35", "579.99", "580.00", "595.1", None]
    for gpu, driver in itertools.product([GTX_1080, V100, RTX_2080, RTX_4070, RTX_5090], drivers):
        build = chosen(gpu, driver=driver).requirement.partition("+")[2]
        assert cuda_build(gpu.capability, driver) == (None if build == "cpu" else build)
