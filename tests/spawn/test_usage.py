"""Asking drivers how busy their GPUs are: a child for NVML that answers, hangs, dies or talks rubbish."""

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cuadrilla.host import gpus, room
from cuadrilla.host.gpus import NVML_CHILD, Gpus, GpuUsage, NvmlChild, parse_gpus
from tests.commands import wait_for
from tests.conftest import children

ANSWER = """
import json, os, sys
for _ in sys.stdin:
    print(json.dumps({"gpus": [{"index": 0, "name": str(os.getpid()), "busy_percent": 40}]}), flush=True)
"""
NVML = """
class NVMLError(Exception):
    def __init__(self, value=3): self.value = value
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_NOT_FOUND = 12, 9, 6
NVML_TEMPERATURE_GPU = 0
class Rates: gpu = 97
class Memory: used, total, free = 5 * 2**30, 12 * 2**30, 7 * 2**30
class Sample:
    def __init__(self, pid, timeStamp, smUtil): self.pid, self.timeStamp, self.smUtil = pid, timeStamp, smUtil
def nvmlInit(): {init}
def nvmlSystemGetDriverVersion(): return "580.82"
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index):
    if index == 2: raise NVMLError()
    return index
def nvmlDeviceGetName(card): return b"RTX" if card == 0 else "Other"
def only_first(card, value=None):
    if card: raise NVMLError()
    return value
def nvmlDeviceGetUUID(card): return only_first(card, "GPU-aa")
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


def test_the_child_stays_and_is_asked_again() -> None:
    watched = Gpus(program(ANSWER))
    first, second = watched.sample(), watched.sample()
    assert first == second
    assert (first[0].busy_percent, watched.uses()[0].busy) == (40, 0.4)
    child = psutil.Process(int(first[0].name))
    watched.close()
    assert not child.is_running()
    assert not any(thread.name == "nvml" for thread in threading.enumerate())
    watched.close()


@pytest.mark.parametrize(
    "text",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import time; time.sleep(600)",
        "import sys; sys.stdout.write('x' * 10**6); sys.stdout.flush(); sys.stdin.read()",
        "import sys; print('{\"gpus\": 5}', flush=True); sys.stdin.read()",
        "import sys; print('[' * 10**5, flush=True); sys.stdin.read()",
    ],
    ids=["crash", "hang", "flood", "lie", "deep"],
)
def test_one_that_fails_is_left_alone_for_a_while(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "START_SECONDS", 1.0 if "sleep" in text else 20.0)
    tally = tmp_path / "tally"
    watched = Gpus(program(f"open({str(tally)!r}, 'a').write('x'); {text}"))
    assert [watched.sample() for _ in range(3)] == [(), (), ()]
    assert (tally.read_text(), watched.is_silent) == ("x", True)
    assert not children()


def test_one_that_dies_later_is_missed() -> None:
    watched = Gpus(program(ANSWER.replace("for _ in sys.stdin", "for _ in [sys.stdin.readline()]")))
    assert [len(watched.sample()) for _ in range(2)] == [1, 0]


def test_closing_ends_the_wait_for_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "START_SECONDS", 600.0)
    begun = tmp_path / "begun"
    watched = Gpus(program(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(600)"))
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(watched.sample()))
    asking.start()
    wait_for(begun.exists)
    watched.close()
    asking.join(100)
    assert found == [()]
    assert not children()


@pytest.mark.parametrize(
    ("init", "problem"), [("pass", None), ("raise NVMLError(3)", "3"), ("raise NVMLError(9)", None)]
)
def test_the_real_child_asks_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, problem: str | None
) -> None:
    (tmp_path / "pynvml.py").write_text(NVML.replace("{init}", init))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(NvmlChild(NVML_CHILD)) as child:
        answer = child.ask()
    assert answer.get("problem") == problem
    if init != "pass":
        assert not answer.get("gpus")
        return
    first, *others = parse_gpus(answer["gpus"])
    assert first == GpuUsage(
        index=0, name="RTX", busy_percent=97.0, memory_used_bytes=5 * 2**30, memory_bytes=12 * 2**30,
        temperature_celsius=68.0, power_watts=241.5,
    )  # fmt: skip
    assert others == [GpuUsage(index=1, name="Other"), GpuUsage(index=2, name="GPU"), GpuUsage(index=3, name="Other")]
    assert answer["driver"] == "580.82"
    assert answer["gpus"][0] | {"uuid": "GPU-aa", "capability": [8, 9], "free_bytes": 7 * 2**30} == answer["gpus"][0]
    assert [row["users"] for row in answer["gpus"]] == [[[7, 30], [8, 5]], [], None, None]


def test_a_file_system_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One child waits for it, however often one asks; meanwhile its room is not known."""
    monkeypatch.setattr(room, "mount_of", lambda path: (path, "nfs4"))
    assert room.room_of(tmp_path)[1] == psutil.disk_usage(str(tmp_path)).total
    monkeypatch.setattr(room, "CHILD", "import time; time.sleep(1000)")
    monkeypatch.setattr(room, "SECONDS", 0.1)
    assert room.room_of(tmp_path) == room.UNKNOWN
    child, _ = room._late[str(tmp_path)]
    assert room.room_of(tmp_path) == room.UNKNOWN
    assert room._late.pop(str(tmp_path))[0] is child
    child.communicate()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux ties a process to cores")
def test_a_process_that_may_use_one_core_is_measured_by_that_one() -> None:
    """Busy for ever on one core: with two or more cores, the machine is never busy by half because of it."""
    code = (
        "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from cuadrilla.host.usage import Sampler\n"
        "sampler = Sampler(); sampler.sample(); end = time.process_time() + 0.3\n"
        "while time.process_time() < end: pass\n"
        "print(sampler.sample().cpu_percent)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert float(done.stdout) > 90
