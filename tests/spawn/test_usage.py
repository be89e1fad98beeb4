"""Asking drivers how busy their GPUs are: a child that answers, hangs, dies or talks rubbish."""

import sys
import threading
from pathlib import Path

import pytest

from cuadrilla.host import gpus
from cuadrilla.host.devices import ask
from cuadrilla.host.gpus import Gpus, GpuUsage
from cuadrilla.host.probe import CARDS_CHILD
from tests.commands import wait_for
from tests.conftest import children

NVML = """
class NVMLError(Exception):
    def __init__(self, value=3): self.value = value
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_NOT_FOUND = 12, 9, 6
NVML_TEMPERATURE_GPU = 0
class Rates: gpu = 97
class Memory: used, total = 5 * 2**30, 12 * 2**30
class Sample:
    def __init__(self, pid, timeStamp, smUtil): self.pid, self.timeStamp, self.smUtil = pid, timeStamp, smUtil
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
def nvmlDeviceGetProcessUtilization(card, since):
    if card: raise NVMLError(6 if card == 1 else 3)
    return [Sample(*row) for row in ((7, 1, 90), (7, 2, 30), (8, 1, 5), (0, 1, 5), (9, 3, 4000))]
"""


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize("text", ["import time; time.sleep(600)", "print('{\"gpus\": 5}')"], ids=["hang", "lie"])
def test_one_that_fails_is_left_alone_for_a_while(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "TIMEOUT_SECONDS", 1.0 if "sleep" in text else 20.0)
    tally = tmp_path / "tally"
    watched = Gpus(program(f"open({str(tally)!r}, 'a').write('x'); {text}"))
    assert [watched.sample() for _ in range(3)] == [(), (), ()]
    assert (tally.read_text(), watched.is_silent) == ("x", True)
    assert not children()


def test_closing_ends_the_wait_for_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "TIMEOUT_SECONDS", 600.0)
    begun = tmp_path / "begun"
    watched = Gpus(program(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(600)"))
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(watched.sample()))
    asking.start()
    wait_for(begun.exists)
    watched.close()
    asking.join(100)
    assert (found, watched.is_silent) == ([()], False)
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
    assert [row["users"] for row in answer["gpus"]] == [[[7, 30], [8, 5]], [], None, None]
