"""Child processes that query torch and drivers, and replacements that hang, crash, print rubbish or half an answer."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from cuadrilla.host import gpus
from cuadrilla.host.devices import Device, ask, probe_devices
from cuadrilla.host.gpus import Gpus, GpuUsage
from cuadrilla.host.probe import CARDS_CHILD
from tests.conftest import children

GOOD_TORCH = 'print(\'{"stage": "torch", "version": "2.13.0+cpu", "cuda": null}\\n{"stage": "end"}\')'
BEGIN = 'print(\'{"stage": "torch", "version": "2.13.0"}\\n{"stage": "begin", "kind": "cuda"}\', flush=True)'
NVML = """
class NVMLError(Exception):
    def __init__(self, value=3): self.value = value
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED = 12, 9
NVML_TEMPERATURE_GPU = 0
class Rates: gpu = 97
class Memory: used, total = 5 * 2**30, 12 * 2**30
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "580.82"
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index):
    if index == 2: raise NVMLError()
    return index
def nvmlDeviceGetName(card): return b"RTX" if card == 0 else "Other"
def only_first(card, value=None):
    if card: raise NVMLError()
    return value
def nvmlDeviceGetCudaComputeCapability(card): return only_first(card, (8, 9))
def nvmlDeviceGetUtilizationRates(card): return only_first(card, Rates)
def nvmlDeviceGetMemoryInfo(card): return only_first(card, Memory)
def nvmlDeviceGetPowerUsage(card): return only_first(card, 241500)
def nvmlDeviceGetTemperature(card, kind): return only_first(card, 68)
"""


def program(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def probed(code: str, *, timeout_seconds: float = 20.0) -> list[Device]:
    return probe_devices(timeout_seconds=timeout_seconds, argv=program(code))


def test_a_well_behaved_machine_without_cards():
    (cpu,) = probed(GOOD_TORCH)
    assert (cpu.kind, cpu.torch_version, cpu.error) == ("cpu", "2.13.0+cpu", None)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("print('hola')", "ended with code 0: 'hola'"),
        ("import sys; sys.stdout.buffer.write(bytes(range(128, 256)))", "ended with code 0: '"),
        ('print(\'{"stage": "torch", "vers\', end=\'\')', "ended with code 0: '"),
        ("raise SystemExit('no driver')", "ended with code 1: 'no driver'"),
        ("while True: print('x' * 65536)", "did not answer"),
    ],
)
def test_a_torch_that_fails_before_it_says_anything(code, expected):
    (cpu,) = probed(code)
    assert (cpu.error or "").startswith(f"PyTorch {expected}")
    assert cpu.hint


def test_a_hang_in_cuda_is_a_sick_card_and_a_well_cpu():
    started = time.monotonic()
    gpu, cpu = probed(f"import time; {BEGIN}; time.sleep(600)", timeout_seconds=2.0)
    assert time.monotonic() - started < 30.0
    assert (gpu.kind, gpu.error) == ("cuda", "PyTorch did not answer within 2 s")
    assert (cpu.error, cpu.torch_version) == (None, "2.13.0")


def test_killing_reaches_grandchildren_and_an_open_output_does_not_hold_us(tmp_path: Path):
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    answer = ask(program(code), seconds=3.0)
    assert answer.timed_out
    grandchild = int(note.read_text())
    _, alive = psutil.wait_procs([psutil.Process(grandchild)] if psutil.pid_exists(grandchild) else [], timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_children_are_told_the_order_of_the_cards():
    text = "import os, json; print(json.dumps({'stage': 'torch', 'version': os.environ['CUDA_DEVICE_ORDER']}))"
    cpu = probed(text)[-1]
    assert cpu.torch_version == "PCI_BUS_ID"
    assert os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"


# -- how busy GPUs are -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["import time; time.sleep(600)", "print('{\"gpus\": 5}')"], ids=["hang", "lie"])
def test_one_that_fails_is_left_alone_for_a_while(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "TIMEOUT_SECONDS", 1.0 if "sleep" in text else 20.0)
    tally = tmp_path / "tally"
    watched = Gpus(program(f"open({str(tally)!r}, 'a').write('x'); {text}"))
    assert [watched.sample() for _ in range(3)] == [(), (), ()]
    assert (tally.read_text(), watched.is_silent) == ("x", True)
    assert not children()


def test_the_real_child_asks_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, *others = Gpus(CARDS_CHILD).sample()
    assert first == GpuUsage(
        index=0, name="RTX", busy_percent=97.0, memory_used_bytes=5 * 2**30, memory_bytes=12 * 2**30,
        temperature_celsius=68.0, power_watts=241.5,
    )  # fmt: skip
    assert others == [GpuUsage(index=1, name="Other"), GpuUsage(index=2, name="GPU"), GpuUsage(index=3, name="Other")]
    answer = ask(CARDS_CHILD, seconds=100).first("cards")
    assert (answer["driver"], answer["gpus"][0]["capability"]) == ("580.82", [8, 9])
