"""What the monitor shows: a line for each device or machine, on terminals of any width, in two languages."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from cuadrilla.host.gpus import GpuUsage
from cuadrilla.host.usage import Usage
from cuadrilla.messages import ENGLISH, SPANISH
from cuadrilla.monitor.jobs import JobNow, WorkNow
from cuadrilla.monitor.nodes import NodeLine, NodeNow
from cuadrilla.monitor.run import Machine, RunNow
from cuadrilla.monitor.screen import (
    MachineNow,
    ScreenStyle,
    bar,
    crew_lines,
    cropped,
    duration,
    machine_lines,
    rate,
    sparkline,
    work_lines,
)
from tests.watched import node_from

pytestmark = pytest.mark.unit

GIB = 2**30
GPU = GpuUsage(
    index=0, name="NVIDIA RTX 4070", busy_percent=97.0, memory_used_bytes=int(9.8 * GIB), memory_bytes=12 * GIB,
    temperature_celsius=68.0, power_watts=241.4,
)  # fmt: skip
USAGE = Usage(
    cpu_percent=52.0, memory_used_bytes=int(12.1 * GIB), memory_bytes=31 * GIB, disk_free_bytes=412 * GIB,
    disk_bytes=931 * GIB, disk_read_bytes_per_second=0.0, disk_written_bytes_per_second=1.25e6,
    network_sent_bytes_per_second=1.2e8, network_received_bytes_per_second=34_000.0, temperature_celsius=54.0,
    battery_percent=87.0, on_battery=True, gpus=(GPU, GpuUsage(index=1, name="Tesla")),
)  # fmt: skip
MACHINE = MachineNow(name="buey", clock="03:50:11", processor="Ryzen 7", usage=USAGE)
NOW = 1_795_569_100.0
PLAIN = ScreenStyle(blocks=False)


def node(name: str, *, ago: float = 3.0, **more: object) -> NodeNow:
    """Of a machine that has said something every five seconds."""
    row = {
        "kind": "usage", "cpu_percent": 50, "memory_used_bytes": 12 * GIB, "memory_bytes": 31 * GIB, "phase": "sending",
        "waiting_part": 0.07, "sent_bytes_per_second": 1.1e8, "received_bytes_per_second": 5e4, **more,
    }  # fmt: skip
    hello = {"time": NOW - 60, "kind": "hello", "facts": {"device": "cuda"}}
    return node_from(name, [hello, *({"time": NOW - ago - 5 * left, **row} for left in range(9, -1, -1))])


def member(name: str, **more: object) -> Machine:
    settings = {"here": True, "node": node(name), "seen": NOW - 3, "share": 0.5, "tokens_per_second": 1234.5, **more}
    return Machine(name=name, **settings)  # type: ignore[arg-type]


WORD = NodeLine(time=NOW, level="warning", text="loss is nan")
CREW = RunNow(
    name="mío", state="running", time=NOW, version=1318, tokens=5, loss=4.1109, bits_per_byte=1.29,
    tokens_per_second=42_700.0, seen=NOW - 3,
    machines=(member("pc", word=WORD, node=node("pc", gpus=[GPU.__dict__], round_trip_seconds=0.004)), member("mac"),
             member("old", here=False, share=None, tokens_per_second=None, seen=NOW - 7200, node=NodeNow(name="old"))),
)  # fmt: skip


def texts(lines: list[object]) -> list[str]:
    return [line.text for line in lines]  # type: ignore[attr-defined]


def test_this_machine_in_plain_lines() -> None:
    assert texts(machine_lines(MACHINE, style=PLAIN)) == [
        "03:50:11  CPU        52 %  54 °C  memory 12.1/31.0 GiB  Ryzen 7",
        "03:50:11  GPU 0      97 %  memory 9.8/12.0 GiB  68 °C  241 W  NVIDIA RTX 4070",
        "03:50:11  GPU 1       n/a  memory n/a  Tesla",
        "03:50:11  disk       56 %  412 GiB free  reads 0 kB/s  writes 1.2 MB/s",
        "03:50:11  network   sends 120.0 MB/s  receives 34 kB/s",
        "03:50:11  battery    87 %  on battery",
    ]
    spanish = texts(machine_lines(MACHINE, style=replace(PLAIN, language=SPANISH)))
    assert spanish[0] == "03:50:11  CPU        52 %  54 °C  memoria 12,1/31,0 GiB  Ryzen 7"
    assert spanish[2] == "03:50:11  GPU 1       n/a  memoria n/a  Tesla"
    assert spanish[5] == "03:50:11  batería    87 %  con batería"


def test_this_machine_on_a_terminal() -> None:
    past = [replace(USAGE, cpu_percent=value, gpus=()) for value in (0.0, 50.0, 100.0, None)]
    lines = texts(machine_lines(replace(MACHINE, past=past), style=ScreenStyle(width=100)))
    assert lines[0] == "buey  03:50:11"
    assert lines[1] == f"CPU       ██████████░░░░░░░░░░   52 %  ▁▅█ ▅{' ' * 19}  54 °C  Ryzen 7"
    assert lines[2].startswith("memory    ████████░░░░░░░░░░░░   39 %  ▄▄▄▄▄")
    assert lines[3].startswith(f"GPU 0     ███████████████████░   97 %      █{' ' * 19}  memory 9.8/12.0 GiB  68 °C")
    assert "█" not in "".join(texts(machine_lines(MACHINE, style=ScreenStyle(width=100, blocks=False))))


def test_a_machine_that_tells_nothing() -> None:
    silent = MachineNow(name="x", clock="0", processor="", usage=Usage(), gpus_silent=True)
    assert texts(machine_lines(silent, style=PLAIN)) == [
        "0  CPU         n/a  memory n/a",
        "0  GPU         n/a  does not answer",
    ]
    assert len(machine_lines(silent, style=ScreenStyle(width=80))) == 4


def test_heat_and_full_disks_stand_out() -> None:
    hot = replace(USAGE, disk_free_bytes=1000, gpus=(replace(GPU, temperature_celsius=95.0),))
    styles = {
        line.text.split()[1]: line.style for line in machine_lines(replace(MACHINE, usage=hot), style=PLAIN)
    }  # fmt: skip
    assert (styles["CPU"], styles["GPU"], styles["disk"], styles["battery"]) == ("", "red", "red", "yellow")


def test_a_crew_in_plain_lines() -> None:
    head, names, pc, mac, old = texts(crew_lines(CREW, style=PLAIN, clock="10:00:00"))
    assert head == (
        "10:00:00  mío  running  step 1,318  loss 4.111  held-out 1.290 bits/byte  42,700 tokens/s  workers: 2"
    )
    assert re.split(r"  +", names) == [
        "machine", "device", "phase", "share", "tokens/s", "waits", "CPU", "memory, GiB", "GPU", "GPU, GiB", "°C", "W",
        "up", "down", "round trip", "lag", "last word",
    ]  # fmt: skip
    assert re.split(r"  +", pc) == [
        "pc", "cuda", "sending", "50 %", "1,234", "7 %", "50 %", "12.0/31.0", "97 %", "9.8/12.0", "68", "241",
        "110.0 MB/s", "50 kB/s", "4 ms", "3 s", "! loss is nan",
    ]  # fmt: skip
    assert re.split(r"  +", mac)[8:15] == ["-", "-", "-", "-", "110.0 MB/s", "50 kB/s", "-"]
    assert re.split(r"  +", old)[:4] == ["old", "-", "gone", "-"]
    assert old.endswith("  2 h")


def test_a_crew_that_has_ended_in_spanish() -> None:
    ended = replace(CREW, state="complete", machines=tuple(replace(one, here=False) for one in CREW.machines))
    head, names, pc, *_ = texts(crew_lines(ended, style=replace(PLAIN, language=SPANISH)))
    assert head.endswith("42.700 tokens/s  última señal hace 3 s")
    assert "retraso" in names
    assert "última señal" in pc
    assert {line.style for line in crew_lines(ended, style=PLAIN)[2:]} == {"dim"}


def test_a_run_that_nobody_has_joined() -> None:
    empty = RunNow(name="x", state="waiting", time=NOW)
    assert texts(crew_lines(empty, style=PLAIN)) == ["x  not begun", "no machine has worked in this run yet"]


def test_a_machine_that_is_silent_stands_out() -> None:
    late = replace(CREW, machines=(member("pc", node=node("pc", ago=40), seen=NOW - 40),))
    assert crew_lines(late, style=PLAIN)[2].style == "yellow"
    assert crew_lines(CREW, style=PLAIN)[2].style == ""


def test_the_columns_of_most_use_where_there_is_little_room() -> None:
    narrow = texts(crew_lines(CREW, style=ScreenStyle(width=70)))
    assert re.split(r"  +", narrow[1])[:4] == ["machine", "phase", "share", "tokens/s"]


HOSTILE = st.text(max_size=60)


@settings(max_examples=40)
@given(st.integers(20, 260), st.integers(3, 40), st.sampled_from([ENGLISH, SPANISH]), HOSTILE, HOSTILE)
def test_nothing_is_wider_or_longer_than_the_terminal(
    width: int, height: int, language: str, name: str, word: str
) -> None:
    style = ScreenStyle(width=width, height=height, language=language)
    said = [{"time": NOW, "kind": "log", "level": "error", "text": word}]
    log = node_from(name, said).log
    members = [member(f"pc-{number}") for number in range(12)]
    hostile = Machine(name=node_from(name, []).name, here=True, node=node(name), word=log[0])
    for lines in (
        crew_lines(replace(CREW, machines=(hostile, *members)), style=style),
        machine_lines(MACHINE, style=style),
    ):
        assert len(lines) < height or height < 5
        assert max(cell_len(line.text) for line in lines) <= width
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202e]", "".join(line.text for line in lines))


def test_more_machines_than_lines() -> None:
    many = replace(CREW, machines=tuple(member(f"pc-{number:03}") for number in range(100)))
    lines = texts(crew_lines(many, style=ScreenStyle(width=120, height=24)))
    assert lines[-1] == "... and 80 more machines"
    assert len(texts(crew_lines(many, style=PLAIN))) == 102


def test_small_parts() -> None:
    assert bar(None, cells=4) == "░░░░"
    assert bar(250.0, cells=4, blocks=False) == "####"
    assert sparkline([None, -5.0, 0.0, 49.0, 100.0, 1e9], cells=6, most=100.0) == " ▁▁▄██"
    assert sparkline([0.0, 0.0], cells=9, most=0.0) == "▁▁"
    assert (
        sparkline(range(100), cells=3, most=99.0) == "▇██" or cell_len(sparkline(range(100), cells=3, most=99.0)) == 3
    )
    assert [duration(seconds) for seconds in (-5, 99, 100, 6000, 200_000)] == ["0 s", "99 s", "2 min", "2 h", "2 d"]
    assert [rate(value) for value in (None, 0, 999_000, 1.5e6)] == ["-", "0 kB/s", "999 kB/s", "1.5 MB/s"]
    assert cropped("日本語", cells=4) == "日 …"


def test_what_this_machine_hands_out() -> None:
    """A name that is a word of ours stays what it is."""
    jobs = [JobNow(name=str(n), title="", run=None, state=state) for n, state in enumerate(("complete", "running"))]
    members = tuple(replace(each, share=None, job="failed 3/9") for each in CREW.machines[:2])
    work = WorkNow(kind="queue", title="", jobs=jobs, machines=replace(CREW, machines=members))
    head, names, pc, _ = texts(work_lines(work, style=PLAIN, clock="10:00:00"))
    assert head == "10:00:00  queue  running  ended: 1 of 2  machines: 2"
    assert re.split(r"  +", names)[:4] == ["machine", "device", "job", "phase"]
    assert re.split(r"  +", pc)[:4] == ["pc", "cuda", "failed 3/9", "sending"]
    search = replace(work, kind="search", title="mío", machines=replace(CREW, machines=(), state="stopped"))
    spanish = texts(work_lines(search, style=replace(PLAIN, language=SPANISH)))
    assert spanish == [
        "búsqueda de mío  parado  han acabado: 1 de 2  máquinas: 0",
        "todavía no se ha unido ninguna máquina",
    ]
    assert "failed 3/9" in texts(work_lines(work, style=replace(PLAIN, language=SPANISH)))[2]
    narrow = texts(work_lines(work, style=ScreenStyle(width=40, height=6)))
    assert len(narrow) == 4
    assert all(cell_len(line) <= 40 for line in narrow)
