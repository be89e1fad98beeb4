"""What the monitor shows: a line for each device or machine, on terminals of any width, in two languages."""

import re
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console, RenderableType

from cuadrilla.host.gpus import GpuUsage
from cuadrilla.host.usage import Usage
from cuadrilla.monitor.screen import duration, machine_screen, rate, run_screen

GIB = 2**30
GPU = GpuUsage(
    index=0, name="NVIDIA RTX 4070", busy_percent=97.0, memory_used_bytes=int(9.8 * GIB), memory_bytes=12 * GIB,
    temperature_celsius=68.0, power_watts=241.4,
)  # fmt: skip
USAGE = Usage(
    cpu_percent=52.0, memory_used_bytes=int(12.1 * GIB), memory_bytes=31 * GIB, disk_free_bytes=412 * GIB,
    disk_bytes=931 * GIB, network_sent_bytes_per_second=1.2e8, network_received_bytes_per_second=34_000.0,
    temperature_celsius=54.0, battery_percent=87.0, on_battery=True, gpus=(GPU, GpuUsage(index=1, name="Tesla")),
)  # fmt: skip
NOW = 1_795_569_100.0


def machine(name: str, **more: Any) -> dict[str, Any]:
    row = {
        "name": name, "here": True, "works": True, "share": 0.5, "tokens_per_second": 1234.5, "seen": NOW - 3,
        "phase": "sending", "waiting_part": 0.07, "sent_bytes_per_second": 1.1e8, "received_bytes_per_second": 5e4,
        "round_trip_seconds": 0.004, "facts": {"device": "cuda"}, "word": None, "job": "",
        "usage": {"cpu_percent": 50, "memory_used_bytes": 12 * GIB, "memory_bytes": 31 * GIB},
    }  # fmt: skip
    return row | more


PC = machine(
    "pc",
    usage={"cpu_percent": 50, "gpus": [GPU.__dict__]},
    word={"time": NOW, "level": "warning", "text": "loss is nan"},
)
OLD = machine("old", here=False, share=None, tokens_per_second=None, phase=None, seen=NOW - 7200, usage={}, facts={})
CREW: dict[str, Any] = {
    "name": "mío", "state": "running", "reason": "", "time": NOW, "version": 1318, "loss": 4.1109,
    "val_bits_per_byte": 1.29, "tokens_per_second": 42_700.0, "seen": NOW - 3,
    "machines": [PC, machine("mac"), OLD],
}  # fmt: skip


def lines(shown: RenderableType, *, width: int = 1000, colour: bool = False) -> list[str]:
    console = Console(width=width, force_terminal=colour, color_system="standard" if colour else None)
    with console.capture() as said:
        console.print(shown)
    return [line.rstrip() for line in said.get().splitlines()]


def test_this_machine() -> None:
    now = {"machine": "buey", "processor": "Ryzen 7", "gpus_silent": False, **asdict(USAGE)}
    assert lines(machine_screen(now, clock="03:50:11")) == [
        "buey  03:50:11",
        "CPU      52 %  54 °C  Ryzen 7",
        "memory   39 %  12.1/31.0 GiB",
        "GPU 0    97 %  9.8/12.0 GiB  68 °C  241 W  NVIDIA RTX 4070",
        "GPU 1       -  Tesla",
        "disk     56 %  412 GiB free",
        "network     -  sends 120.0 MB/s  receives 34 kB/s",
        "battery  87 %  on battery",
    ]


def test_a_machine_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "es")
    silent = {"machine": "x", "processor": "", "gpus_silent": True, **asdict(Usage()), "nodes": ["ana"]}
    said = lines(machine_screen(silent, clock="0"))
    assert said[1] == "CPU      -  -"
    assert said[3] == "GPU      -  no responde"
    assert said[-1] == "máquinas de esta cuadrilla: ana"


def test_a_crew() -> None:
    head, names, pc, mac, old = lines(run_screen(CREW, clock="10:00:00"))
    assert head == (
        "10:00:00  mío  running  step 1,318  loss 4.111  held-out 1.290 bits/byte  42,700 tokens/s  workers: 2"
    )
    [far, *_] = lines(run_screen(CREW | {"num_steps": 2000, "left_seconds": 300.0}, clock="10:00:00"))
    assert "running  step 1,318 of 2,000 (66%)  5 min left  loss 4.111" in far
    heads = "machine phase share tokens/s waits CPU GPU °C up down lag last word"
    assert names.split() == heads.split()
    shown = "pc sending 50 % 1,234 7 % 50 % 97 % 68 110.0 MB/s 50 kB/s 3 s ! loss is nan"
    assert pc.split() == shown.split()
    assert mac.split()[:4] == ["mac", "sending", "50", "%"]
    assert re.split(r" +", old)[:3] == ["old", "gone", "-"]
    narrow = lines(run_screen(CREW, clock="10:00:00", width=80), width=80)
    assert narrow[2].split()[:4] == ["machine", "phase", "share", "tokens/s"]


def test_a_crew_that_has_ended_in_spanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "es")
    kicked = {**OLD, "word": {"time": NOW, "level": "warning", "text": "it was kicked"}}
    machines = [{**each, "here": False, "phase": None} for each in [PC, kicked]]
    ended = {**CREW, "state": "complete", "reason": "the run was stopped by Ctrl-C", "machines": machines}
    head, names, pc, old = lines(run_screen(ended, clock="10:00:00"))
    assert head.endswith("42.700 tokens/s  última señal hace 3 s  Ctrl-C paró el entrenamiento")
    assert old.endswith("! fue despedida")
    assert "retraso" in names
    assert "última señal" in pc


def test_a_run_that_nobody_has_joined() -> None:
    empty = {"name": "x", "state": "waiting", "reason": "", "time": NOW, "seen": None, "machines": []}
    assert lines(run_screen(empty, clock="0")) == ["0  x  not begun", "no other machine has joined yet"]
    here = {**empty, "state": "running", "tokens_per_second": 1023.0}
    assert lines(run_screen(here, clock="0")) == ["0  x  running  1,023 tokens/s"]


def test_what_this_machine_hands_out() -> None:
    """A machine's name is not translated, even if it is a word of the catalogue."""
    crew = {**CREW, "name": "queue", "machines": [{**PC, "share": None, "job": "failed 3/9"}]}
    head, names, pc = lines(run_screen(crew, clock="10:00:00"))
    assert head.startswith("10:00:00  queue  running")
    assert (names.split()[1], pc.split()[1:3]) == ("job", ["failed", "3/9"])


def test_figures_in_words() -> None:
    assert [duration(seconds) for seconds in (99, 100, 6000, 200_000)] == ["99 s", "2 min", "2 h", "2 d"]
    assert [rate(value) for value in (None, 0, 999_000, 1.5e6)] == ["-", "0 kB/s", "999 kB/s", "1.5 MB/s"]
