"""How busy a machine is: recorded texts of drivers, limits of containers, figures from other machines."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.host import usage as module
from cuadrilla.host.container import find_cgroups, read_cpu, read_memory
from cuadrilla.host.gpus import MOST_GPUS, CardUse, Gpus, GpuUsage, others_on, parse_gpus, parse_ioreg, parse_uses
from cuadrilla.host.usage import (
    Sampler,
    Usage,
    counted_interfaces,
    cpu_temperature,
    parse_usage,
    usage_data,
    whole_usage_data,
)

pytestmark = pytest.mark.unit

BUSY = GpuUsage(
    index=0,
    name="NVIDIA GeForce RTX 4070",
    busy_percent=98.0,
    memory_used_bytes=8000 * 2**20,
    memory_bytes=12282 * 2**20,
    temperature_celsius=71.0,
    power_watts=190.25,
)
WHOLE = Usage(
    cpu_percent=52.5,
    memory_used_bytes=3 * 2**30,
    memory_bytes=16 * 2**30,
    process_cpu_percent=310.0,
    process_memory_bytes=2**29,
    disk_free_bytes=2**39,
    disk_bytes=2**40,
    disk_read_bytes_per_second=12.5,
    disk_written_bytes_per_second=0.0,
    network_sent_bytes_per_second=1e6,
    network_received_bytes_per_second=2e6,
    temperature_celsius=54.0,
    battery_percent=87.0,
    on_battery=True,
    gpus=(BUSY, GpuUsage(index=1, name="Tesla")),
)
WRONG = ("12", None, True, math.nan, math.inf, -math.inf, -1000, 1e30, 10**400, [1], {"a": 1})


def test_ioreg() -> None:
    text = '"model" = "Apple M2"\n"PerformanceStatistics" = {"In use system memory"=1024,"Device Utilization %"=37}'
    apple = GpuUsage(index=0, name="Apple M2", busy_percent=37.0, memory_used_bytes=1024)
    assert parse_gpus(parse_ioreg(text)) == (apple,)
    assert parse_ioreg("") == parse_ioreg(f'"Device Utilization %" = {"9" * 5000}') == []


def test_a_sample_travels_as_plain_data() -> None:
    told = json.loads(json.dumps(usage_data(WHOLE)))
    assert parse_usage(told) == Usage(**{**WHOLE.__dict__, "gpus": (parse_gpus(told["gpus"]))})
    assert parse_usage(told).gpus[1] == WHOLE.gpus[1]
    assert usage_data(Usage(cpu_percent=100 / 3)) == {"cpu_percent": 33.3}
    assert set(whole_usage_data(Usage())) == set(Usage.__dataclass_fields__)
    assert whole_usage_data(WHOLE)["gpus"][1]["power_watts"] is None


@pytest.mark.parametrize("field", [name for name in Usage.__dataclass_fields__ if name not in ("gpus", "on_battery")])
def test_what_can_not_be_is_not_known(field: str) -> None:
    assert getattr(parse_usage({field: 10}), field) == 10
    assert {getattr(parse_usage({field: value}), field) for value in WRONG} == {None}


def test_names_and_numbers_of_gpus_are_bounded() -> None:
    hostile = [{"index": n, "name": "\x1b[2J" + "x" * 5000 + "\n", "busy_percent": 1e9} for n in range(1000)]
    found = parse_usage({"gpus": hostile, "on_battery": "yes"})
    assert len(found.gpus) == MOST_GPUS
    assert found.gpus[3].index == 3
    assert len(found.gpus[3].name) == 200
    assert found.gpus[3].name.startswith("\\u001b[2Jx")
    assert {gpu.busy_percent for gpu in found.gpus} == {None}
    assert found.on_battery is None
    assert parse_gpus([3, None, {"index": -1, "name": 5}]) == (GpuUsage(index=2, name="GPU"),)
    assert parse_gpus("no list") == ()


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*Usage.__dataclass_fields__]), ANY_JSON))
def test_anything_can_be_parsed_and_told_again(row: dict[str, object]) -> None:
    json.dumps(usage_data(parse_usage(row)), allow_nan=False)


def test_two_samples_of_this_machine(tmp_path: Path) -> None:
    with Sampler(gpus=Gpus(()), folder=tmp_path) as sampler:
        first = sampler.sample()
        assert (first.cpu_percent, first.network_sent_bytes_per_second) == (None, None)
        assert sum(range(2_000_000)) > 0
        second = sampler.sample()
    assert 0 < (second.process_memory_bytes or 0) < (second.memory_bytes or 0)
    assert (second.process_cpu_percent or 0) > 0
    assert 0 <= (second.disk_free_bytes or 0) <= (second.disk_bytes or 0)
    assert second.gpus == ()
    assert not sampler.gpus_silent


def test_what_is_not_there_is_unknown() -> None:
    with Sampler(pid=2**22 + 1, gpus=Gpus(["/nonexistent/python"]), folder=Path("/nonexistent")) as sampler:
        sample = sampler.sample()
    assert (sample.process_memory_bytes, sample.disk_bytes, sample.gpus) == (None, None, ())
    assert sampler.gpus_silent


class NoPsutil:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"/proc is not mounted: {name}")


def test_a_system_that_tells_nothing_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "psutil", NoPsutil())
    with Sampler(gpus=Gpus(())) as sampler:
        assert usage_data(sampler.sample()) == {}


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
    "proc/self/cgroup": "0::/box/inner\n",  # which only its host has
    "box/memory.max": "9223372036854771712",
    "memory.max": f"{2**30}\n",
    "memory.current": f"{700 * 2**20}\n",
    "memory.stat": f"inactive_file {200 * 2**20}\n",
}


@pytest.mark.parametrize("files", [V2, V1, TIGHTER])
def test_a_container_is_measured_by_what_it_may_use(tmp_path: Path, files: dict[str, str]) -> None:
    root = tree(tmp_path, files)
    groups = find_cgroups(root, root / "proc")
    assert read_memory(groups) == (500 * 2**20, 2**30)
    assert read_cpu(groups) == (3.0, 1.5)
    with Sampler(gpus=Gpus(()), cgroups=groups) as sampler:
        sampler.sample()
        idle = sampler.sample()
        tree(root, {"box/cpu.stat": "usage_usec 900000000000\n", "cpuacct/box/cpuacct.usage": f"{10**15}\n"})
        busy = sampler.sample()
    assert (idle.cpu_percent, busy.cpu_percent) == (0.0, 100.0)
    assert (busy.memory_used_bytes, busy.memory_bytes) == (500 * 2**20, 2**30)


def test_no_limit_is_the_whole_machine(tmp_path: Path) -> None:
    groups = find_cgroups(tree(tmp_path, {"memory.max": "max\n", "cpu.max": "rubbish\n"}), tmp_path / "proc")
    assert (read_memory(groups), read_cpu(groups)) == (None, None)
    unreadable = tree(tmp_path, {"memory.max": "4096\n", "memory.current": "?\n", "cpu.max": "100000 100000\n"})
    groups = find_cgroups(unreadable, tmp_path / "proc")
    assert (read_memory(groups), read_cpu(groups)) == (None, None)


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
    assert counted_interfaces(names) == counted


def test_the_temperature_is_the_processors() -> None:
    chips = {"nvme": [80.0], "acpitz": [30.0], "coretemp": [54.0, 61.0, None, 0.0]}
    assert cpu_temperature(chips) == 61.0
    assert cpu_temperature({"acpitz": [30.0]}) == 30.0
    assert cpu_temperature({"nvme": [80.0], "k10temp": [math.nan]}) is None


OURS, GAME = 100, 200


@pytest.mark.parametrize(
    ("cards", "works", "told_apart", "part"),
    [
        ([], False, True, None),
        ([CardUse(busy=0.9, users={OURS: 0.9})], True, True, 0.0),
        ([CardUse(busy=0.9, users={OURS: 0.5, GAME: 0.4})], True, True, 0.4),
        ([CardUse(busy=1.0, users={GAME: 0.8, 201: 0.7})], True, True, 1.0),
        ([CardUse(busy=0.9, users={OURS: 0.5, GAME: 0.4})], True, False, None),  # numbers of another system
        ([CardUse(busy=0.9, users={GAME: 0.4})], False, False, 0.9),
        ([CardUse(busy=0.9)], True, True, None),  # Apple, WSL: it may be all ours
        ([CardUse(busy=0.9)], False, True, 0.9),
        ([CardUse()], False, True, None),
        ([CardUse(busy=0.1), CardUse(users={GAME: 0.6})], False, True, 0.6),
    ],
)
def test_what_of_a_card_others_use(cards: list[CardUse], works: bool, told_apart: bool, part: float | None) -> None:
    assert others_on(cards, ours={OURS}, told_apart=told_apart, all_are_others=not works) == part


def test_uses_are_parts() -> None:
    rows = [{"index": 0, "busy_percent": 98, "users": [[7, 90], [8, 8]]}, {"busy_percent": None, "users": None}]
    assert parse_uses(rows) == (CardUse(busy=0.98, users={7: 0.9, 8: 0.08}), CardUse())
