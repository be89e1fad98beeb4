"""Which devices of a machine work: the choice of `auto`, the meaning of names, and the cores of each device."""

import pytest

from cuadrilla.errors import DeviceError
from cuadrilla.host.devices import Device
from cuadrilla.plan.devices import DeviceChoice, Use, choose_devices, uses_of

CPU = Device(kind="cpu", index=0, name="a processor")
CARDS = [Device(kind="cuda", index=index, name=f"card {index}") for index in range(2)]
SICK = Device(kind="cuda", index=2, name="old", error="PyTorch has no kernels for it", hint="another PyTorch")
MAC = Device(kind="mps", index=0, name="M4")


def chosen(
    wanted: str, *found: Device, cores: int = 8, strict: bool = False, visible: str | None = None
) -> DeviceChoice:
    return choose_devices(wanted, found, cores=cores, strict=strict, visible=visible)


def labels(choice: DeviceChoice) -> list[str]:
    return [use.name or use.device for use in choice.uses]


def test_auto_takes_every_card_that_is_well_and_says_what_it_leaves_out() -> None:
    choice = chosen("auto", *CARDS, SICK, CPU)
    assert labels(choice) == ["cuda:0", "cuda:1"]
    sick, slow = choice.notes
    assert sick == "without cuda:2: PyTorch has no kernels for it"
    assert slow == "without the processor; --devices cuda:0,cuda:1,cpu uses it"


def test_auto_takes_the_processor_only_without_an_accelerator() -> None:
    assert labels(chosen("auto", MAC, CPU)) == ["mps"]
    assert labels(chosen("mps,cpu", MAC, CPU)) == ["mps", "cpu"]
    assert labels(chosen("auto", MAC, CPU, strict=True)) == ["mps"]
    assert labels(chosen("auto", SICK, CPU)) == ["cpu"]
    assert labels(chosen("auto", CPU)) == ["cpu"]


def test_the_only_device_needs_no_name_and_has_all_cores() -> None:
    assert chosen("auto", CPU).uses == (Use(name="", device="cpu", threads=8),)
    assert chosen("cuda:1", *CARDS, CPU).uses == (Use(name="", device="cuda:1", threads=8),)


def test_each_card_is_alone_in_its_process() -> None:
    first, second, processor = chosen("cuda,cuda:1,cpu", *CARDS, CPU, visible="5, 3").uses
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert (second.name, second.device, second.environment["CUDA_VISIBLE_DEVICES"]) == ("cuda:1", "cuda", "3")
    assert processor == Use(name="cpu", device="cpu", threads=6)
    assert (first.threads, second.threads) == (1, 1)
    assert uses_of(["cuda:0", "cuda:1"], cores=8)[1].environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_processors_share_the_cores() -> None:
    assert uses_of(["cpu", "cpu", "cpu"], cores=8) == (
        Use(name="cpu", device="cpu", threads=2),
        Use(name="cpu.2", device="cpu", threads=2),
        Use(name="cpu.3", device="cpu", threads=2),
    )
    assert [use.threads for use in uses_of(["cpu", "cpu"], cores=1)] == [1, 1]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("cuda:7", "this machine has no device 'cuda:7': cuda:0, cuda:1, cuda:2, cpu"),
        ("", "no device ''"),
        ("auto,cpu", "no device 'auto'"),
        ("mps", "no device 'mps'"),
        ("cuda:2", "cuda:2: PyTorch has no kernels for it"),
        ("cuda,cuda:0", "cuda:0 is named twice"),
    ],
)
def test_what_cannot_work_is_refused(wanted: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason) as caught:
        chosen(wanted, *CARDS, SICK, CPU)
    assert caught.value.hint


def test_strict_training_wants_one_kind() -> None:
    with pytest.raises(DeviceError, match="one kind"):
        chosen("cuda:0,cpu", *CARDS, CPU, strict=True)
    assert labels(chosen("cuda:0,cuda:1", *CARDS, CPU, strict=True)) == ["cuda:0", "cuda:1"]
