"""Asking drivers how busy their GPUs are: a child for NVML that answers, hangs, dies or talks rubbish."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cuadrilla.host import gpus
from cuadrilla.host.gpus import NVML_CHILD, GpuSampler, GpuUsage
from tests.commands import wait_for
from tests.slow_folder import BLOCK_BYTES, BLOCKS

SMI = "0, Tesla, 5, 1, 2, 40, 30"
ANSWER = """
import json, os, sys
for _ in sys.stdin:
    print(json.dumps({"gpus": [{"index": 0, "name": str(os.getpid()), "busy_percent": 40}]}), flush=True)
"""
NVML = """
class NVMLError(Exception): value = 3
NVML_TEMPERATURE_GPU = 0
class Rates: gpu = 97
class Memory: used, total = 5 * 2**30, 12 * 2**30
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 2: raise NVMLError()
    return index
def nvmlDeviceGetName(card): return b"RTX" if card == 0 else "Other"
def only_first(card, value):
    if card: raise NVMLError()
    return value
def nvmlDeviceGetUtilizationRates(card): return only_first(card, Rates)
def nvmlDeviceGetMemoryInfo(card): return only_first(card, Memory)
def nvmlDeviceGetPowerUsage(card): return only_first(card, 241500)
def nvmlDeviceGetTemperature(card, kind): return only_first(card, 68)
"""


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def sampler_of(nvml: list[str], *, smi: str = f"print({SMI!r})") -> GpuSampler:
    return GpuSampler(argv=program(smi), nvml_argv=nvml)


def test_the_child_stays_and_is_asked_again() -> None:
    sampler = sampler_of(program(ANSWER))
    first, second = sampler.sample(), sampler.sample()
    assert first == second
    assert first[0].busy_percent == 40
    child = psutil.Process(int(first[0].name))
    sampler.close()
    assert not child.is_running()
    assert not any(thread.name == "nvml" for thread in threading.enumerate())
    sampler.close()


@pytest.mark.parametrize(
    "text",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "raise SystemExit(0)",
        "import time; time.sleep(600)",
        "import sys; sys.stdout.write('x' * 10**6); sys.stdout.flush(); sys.stdin.read()",
        "import sys; print('{\"gpus\": 5}', flush=True); sys.stdin.read()",
        "import sys; print('[' * 10**5, flush=True); sys.stdin.read()",
    ],
    ids=["crash", "end", "hang", "flood", "lie", "deep"],
)
def test_where_it_fails_the_program_is_asked_and_the_child_left_alone(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "START_SECONDS", 1.0 if "sleep" in text else 20.0)
    tally = tmp_path / "tally"
    sampler = sampler_of(program(f"open({str(tally)!r}, 'a').write('x'); {text}"))
    assert [sampler.sample()[0].name for _ in range(2)] == ["Tesla", "Tesla"]
    assert tally.read_text() == "x"
    assert not sampler.is_silent
    assert psutil.Process().children() == []


def test_one_that_dies_later_is_missed(tmp_path: Path) -> None:
    sampler = sampler_of(program(ANSWER.replace("for _ in sys.stdin", "for _ in [sys.stdin.readline()]")))
    assert [sampler.sample()[0].busy_percent for _ in range(2)] == [40, 5]


def test_closing_ends_the_wait_for_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "START_SECONDS", 600.0)
    begun = tmp_path / "begun"
    hangs = program(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(600)")
    sampler = sampler_of(hangs, smi="import time; time.sleep(600)")
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(sampler.sample()))
    asking.start()
    wait_for(begun.exists)
    sampler.close()
    asking.join(100)
    assert found == [()]
    assert psutil.Process().children() == []


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "START_SECONDS", 0.3)
    monkeypatch.setattr(gpus, "TIMEOUT_SECONDS", 0.3)
    sampler = sampler_of(program("import time; time.sleep(600)"), smi="import time; time.sleep(600)")
    assert sampler.sample() == ()
    assert sampler.is_silent
    assert psutil.Process().children() == []


@pytest.mark.parametrize("init", ["pass", "raise NVMLError()"])
def test_the_real_child_asks_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    (tmp_path / "pynvml.py").write_text(NVML.replace("{init}", init))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sampler = sampler_of(list(NVML_CHILD))
    found = sampler.sample()
    sampler.close()
    if init != "pass":
        assert [gpu.name for gpu in found] == ["Tesla"]
        return
    assert found == (
        GpuUsage(
            index=0,
            name="RTX",
            busy_percent=97.0,
            memory_used_bytes=5 * 2**30,
            memory_bytes=12 * 2**30,
            temperature_celsius=68.0,
            power_watts=241.5,
        ),
        GpuUsage(index=1, name="Other"),
        GpuUsage(index=2, name="GPU"),
    )


ROOT = Path(__file__).parents[2]
SLOW_BYTES = BLOCKS * BLOCK_BYTES
ASKED = """
import json, sys, threading
from pathlib import Path
import psutil
from cuadrilla.host import room, usage
first, second = usage.Sampler(gpu_argv=[], folder=Path()), usage.Sampler(gpu_argv=[], folder=Path())
samples = [sampler.sample() for sampler in (first, second, first, second)]
room.RETRY_SECONDS = 0
samples += [first.sample(), second.sample()]
waiting = len(psutil.Process().children())
print(json.dumps([[[one.disk_bytes, bool(one.memory_bytes)] for one in samples], waiting, threading.active_count()]))
"""


@pytest.mark.parametrize("milliseconds", [0, 10**9])
def test_a_file_system_that_does_not_answer(milliseconds: int) -> None:
    """One child waits for it, whoever asks and however often; all else of a sample is there, and nobody is kept."""
    tried = ["unshare", "--mount", "true"]
    if os.geteuid() != 0 or not shutil.which("unshare") or subprocess.run(tried, check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    if not Path("/dev/fuse").exists():
        pytest.skip("needs the kernel's FUSE (/dev/fuse)")
    asked = shlex.join([sys.executable, "-P", "-c", ASKED])
    monitor = shlex.join([sys.executable, "-P", "-m", "cuadrilla", "monitor", "--once", "--json"])
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-m", "tests.slow_folder", f"statfs={milliseconds}",
         "sh", "-c", f"{asked} && {monitor}"], capture_output=True, text=True, cwd=ROOT, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (samples, waiting, threads), row = map(json.loads, done.stdout.splitlines())
    size = None if milliseconds else SLOW_BYTES
    assert samples == [[size, True]] * 6
    assert (waiting, threads) == (int(milliseconds > 0), 1)
    assert (row["disk_bytes"], row["memory_bytes"] > 0) == (size, True)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux ties a process to cores")
def test_a_process_that_may_use_one_core_is_measured_by_that_one() -> None:
    """Busy for ever on one core: with two or more cores, the machine is never busy by half because of it."""
    code = (
        "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from cuadrilla.host.usage import Sampler\n"
        "sampler = Sampler(gpu_argv=[]); sampler.sample(); end = time.process_time() + 0.3\n"
        "while time.process_time() < end: pass\n"
        "print(sampler.sample().cpu_percent)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert float(done.stdout) > 90
