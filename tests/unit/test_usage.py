"""How busy a machine is: recorded texts of drivers, limits of containers, figures from other machines."""

import json
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from cuadrilla.host.card import real_cards
from cuadrilla.host.container import Cgroups, read_cpu, read_memory
from cuadrilla.host.gpus import Gpus, GpuUsage, parse_ioreg
from cuadrilla.host.usage import Sampler, Usage, usage_data
from tests.inside import cuadrilla

BUSY = GpuUsage(index=0, name="RTX 4070", busy_percent=98.0, memory_bytes=12 * 2**30, power_watts=190.25)
WHOLE = Usage(cpu_percent=52.5, disk_bytes=2**40, on_battery=True, gpus=(BUSY, GpuUsage(index=1, name="Tesla")))
READ = TypeAdapter(Usage)


def test_ioreg() -> None:
    text = '"model" = "Apple M2"\n"PerformanceStatistics" = {"In use system memory"=1024,"Device Utilization %"=37}'
    assert parse_ioreg(text) == [{"index": 0, "name": "Apple M2", "busy_percent": 37.0, "memory_used_bytes": 1024}]
    assert parse_ioreg("") == parse_ioreg(f'"Device Utilization %" = {"9" * 5000}') == []


def test_a_sample_travels_as_plain_data() -> None:
    assert READ.validate_json(json.dumps(usage_data(WHOLE)), strict=True) == WHOLE
    assert usage_data(Usage(cpu_percent=33.3)) == {"cpu_percent": 33.3}


def test_names_of_gpus_are_bounded() -> None:
    (gpu,) = READ.validate_python(
        {"gpus": [{"index": 3, "name": "\x1b[2J" + "x" * 5000 + "\n", "power_watts": -1}]}
    ).gpus
    assert (gpu.index, len(gpu.name), gpu.name[:11], gpu.power_watts) == (3, 200, "\\u001b[2Jxx", None)


def test_two_samples_of_this_machine(tmp_path: Path) -> None:
    sampler = Sampler(gpus=Gpus(()), folder=tmp_path)
    first = sampler.sample()
    assert first.network_sent_bytes_per_second is None
    second = sampler.sample()
    assert 0 < (second.memory_used_bytes or 0) < (second.memory_bytes or 0)
    assert 0 <= (second.disk_free_bytes or 0) <= (second.disk_bytes or 0)
    assert second.gpus == ()
    assert not sampler.gpus.is_silent


def test_monitor_tells_of_this_machine_once(tmp_path: Path) -> None:
    done = cuadrilla("monitor", "--once", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("CPU ")
    assert "\x1b" not in done.stdout
    (line,) = cuadrilla("monitor", "--once", "--json", cwd=tmp_path).stdout.splitlines()
    told = json.loads(line)
    assert set(told) == {"time", "machine", "processor", "gpus_silent", *Usage.__dataclass_fields__}
    assert 0 <= told["cpu_percent"] <= 100
    assert told["disk_bytes"] > 0


def test_what_is_not_there_is_unknown() -> None:
    sampler = Sampler(gpus=Gpus(["/nonexistent/python"]), folder=Path("/nonexistent"))
    sample = sampler.sample()
    assert (sample.disk_bytes, sample.gpus) == (None, ())
    assert sampler.gpus.is_silent


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/box\n",
    "box/memory.max": f"{2**30}\n",
    "box/memory.current": f"{700 * 2**20}\n",
    "box/memory.stat": f"anon 5\ninactive_file {200 * 2**20}\n",
    "box/cpu.max": "150000 100000\n",
    "box/cpu.stat": "usage_usec 3000000\nuser_usec 1\n",
    "memory.max": "max\n",
    "cpu.max": "max 100000\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
    "memory/box/memory.limit_in_bytes": f"{2**30}\n",
    "memory/box/memory.usage_in_bytes": f"{700 * 2**20}\n",
    "memory/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {200 * 2**20}\n",
    "cpu/box/cpu.cfs_quota_us": "150000\n",
    "cpu/box/cpu.cfs_period_us": "100000\n",
    "cpuacct/box/cpuacct.usage": "3000000000\n",
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "cpu/cpu.cfs_quota_us": "-1\n",
}


TIGHTER = {
    **V2,
    "proc/self/cgroup": "0::/box/inner\n",  # a path that only the host has
    "box/memory.max": "9223372036854771712",
    "memory.max": f"{2**30}\n",
    "memory.current": f"{700 * 2**20}\n",
    "memory.stat": f"inactive_file {200 * 2**20}\n",
}


@pytest.mark.parametrize("files", [V2, V1, TIGHTER])
def test_a_container_is_measured_by_what_it_may_use(tmp_path: Path, files: dict[str, str]) -> None:
    root = tree(tmp_path, files)
    groups = Cgroups(root, root / "proc")
    assert read_memory(groups) == (500 * 2**20, 2**30)
    assert read_cpu(groups) == (3.0, 1.5)
    sampler = Sampler(gpus=Gpus(()), cgroups=groups)
    sampler.sample()
    idle = sampler.sample()
    tree(root, {"box/cpu.stat": "usage_usec 900000000000\n", "cpuacct/box/cpuacct.usage": f"{10**15}\n"})
    busy = sampler.sample()
    assert (idle.cpu_percent, busy.cpu_percent) == (0.0, 100.0)
    assert (busy.memory_used_bytes, busy.memory_bytes) == (500 * 2**20, 2**30)


def test_no_limit_is_the_whole_machine(tmp_path: Path) -> None:
    groups = Cgroups(tree(tmp_path, {"memory.max": "max\n", "cpu.max": "rubbish\n"}), tmp_path / "proc")
    assert (read_memory(groups)[1], read_cpu(groups)) == (psutil.virtual_memory().total, None)
    unreadable = tree(tmp_path, {"memory.max": "4096\n", "memory.current": "?\n", "cpu.max": "100000 100000\n"})
    groups = Cgroups(unreadable, tmp_path / "proc")
    assert (read_memory(groups)[1], read_cpu(groups)) == (psutil.virtual_memory().total, None)


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (["lo", "eth0", "docker0", "veth12", "br-3f1c"], ["eth0"]),
        (["lo", "veth-a"], ["veth-a"]),  # a container's or a namespace's only way out
        (["lo0", "en0", "utun3", "bridge0"], ["en0"]),
        (["Loopback Pseudo-Interface 1", "Wi-Fi"], ["Wi-Fi"]),
        (["lo"], []),
        (["lora0", "wlp2s0"], ["lora0", "wlp2s0"]),
    ],
)
def test_bytes_of_the_network_are_counted_once(names: list[str], counted: list[str]) -> None:
    assert real_cards(names) == counted
