"""What `cuadrilla monitor` shows in a terminal: this machine, or the machines of a run.

Everything here is a pure function of the data that `--json` prints. Foreign text is escaped here (`printable.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cuadrilla.link.base import COORDINATOR
from cuadrilla.messages import Message, language
from cuadrilla.printable import one_line

GIB = 2**30
NARROW_CELLS = 110
UNKNOWN = "-"
Data = Mapping[str, Any]
Machine = dict[str, Any]


# This machine


def machine_screen(now: Data, *, clock: str, width: int | None = None) -> RenderableType:
    """One line for each device, then the machine's crew. `width`: the columns of a terminal."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for label, percent, details in _devices(now):
        table.add_row(_text(label), _text(_percent(percent)), _text(*details))
    parts: list[RenderableType] = [_text(now["machine"], clock, style="bold"), table]
    if crew := now.get("crew"):
        parts += ["", run_screen(crew, clock=clock, width=width)]
    elif nodes := now.get("nodes"):
        parts += ["", _text(Message("machines of this crew: {names}", names=", ".join(nodes)))]
    return Group(*parts)


def _devices(now: Data) -> Iterable[tuple[str, float | None, list[str]]]:
    """(label, percent in use, details) for each device."""
    yield Message("CPU"), now["cpu_percent"], [_known(now["temperature_celsius"], "°C"), now["processor"]]
    used, total = now["memory_used_bytes"], now["memory_bytes"]
    yield Message("memory"), _part(used, total), [_sizes(used, total)]
    for gpu in now["gpus"]:
        memory = _sizes(gpu["memory_used_bytes"], gpu["memory_bytes"])
        heat, watts = _known(gpu["temperature_celsius"], "°C"), _known(gpu["power_watts"], "W")
        yield Message("GPU {index}", index=gpu["index"]), gpu["busy_percent"], [memory, heat, watts, gpu["name"]]
    if now["gpus_silent"]:
        yield Message("GPU"), None, [Message("does not answer")]
    free, room = now["disk_free_bytes"], now["disk_bytes"]
    left: list[str] = [Message("{free:,.0f} GiB free", free=free / GIB)] if free is not None else []
    yield Message("disk"), _part(None if free is None else room - free, room), left
    ways = ((Message("sends"), "sent"), (Message("receives"), "received"))
    rates = [f"{_say(word)} {_say(rate(now[f'network_{way}_bytes_per_second']))}" for word, way in ways]
    yield Message("network"), None, rates
    if now["battery_percent"] is not None:
        power = Message("on battery") if now["on_battery"] else Message("on power")
        yield Message("battery"), now["battery_percent"], [power]


def _part(used: float | None, total: float | None) -> float | None:
    return 100.0 * used / total if used is not None and total else None


# The machines of a run, of a queue or of a search


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table. `wide`: left out on a terminal with less than `NARROW_CELLS` columns."""

    head: Message
    cell: Callable[[Machine], str]
    left: bool = False
    wide: bool = False


def run_screen(now: Data, *, clock: str, width: int | None = None) -> RenderableType:
    """The progress of the run, then one line for each machine. A column without known values is left out."""
    head = _text(clock, *_head(now), style="bold")
    if not now["machines"]:
        nobody = [] if "tokens_per_second" in now else [_text(Message("no other machine has joined yet"))]
        return Group(head, *nobody)
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns: list[Column] = []
    rows = [{**machine, "now": now["time"], "ends": now["state"] != "running"} for machine in now["machines"]]
    for column in COLUMNS:
        is_known = any(column.cell(row) not in ("", UNKNOWN) for row in rows)
        if is_known and (not column.wide or width is None or width >= NARROW_CELLS):
            columns.append(column)
            table.add_column(
                _say(column.head), justify="left" if column.left else "right", no_wrap=column.cell != _word
            )
    for row in rows:
        table.add_row(*(_text(column.cell(row)) for column in columns), style="" if row["here"] else "dim")
    return Group(head, table)


def _head(now: Data) -> list[str]:
    parts = [now["name"], Message("not begun") if now["state"] == "waiting" else now["state"]]
    if (version := now.get("version")) is not None:
        steps = now.get("num_steps")
        far = "step {version:,} of {steps:,} ({part:.0%})" if steps else "step {version:,}"
        parts.append(Message(far, version=version, steps=steps, part=version / (steps or 1)))
    if now.get("left_seconds") is not None:
        parts.append(Message("{time} left", time=duration(now["left_seconds"])))
    if now.get("loss") is not None:
        parts.append(Message("loss {loss:.3f}", loss=now["loss"]))
    if now.get("val_bits_per_byte") is not None:
        parts.append(Message("held-out {bits:.3f} bits/byte", bits=now["val_bits_per_byte"]))
    if "tokens_per_second" in now:
        parts.append(Message("{speed:,.0f} tokens/s", speed=now["tokens_per_second"]))
    if now["state"] == "running" and now["machines"]:
        at_work = sum(machine["here"] and machine["name"] != COORDINATOR for machine in now["machines"])
        parts.append(Message("workers: {count:,}", count=at_work))
    elif now["seen"] is not None:
        parts.append(Message("last seen {time} ago", time=duration(now["time"] - now["seen"])))
    return [*parts, now["reason"]]


def _lag(machine: Machine) -> str:
    """The time since a machine was heard. Clocks of two machines may differ, so a negative time counts as 0."""
    return UNKNOWN if machine["seen"] is None else duration(max(0.0, machine["now"] - machine["seen"]))


def _phase(machine: Machine) -> str:
    if machine["phase"] is None and not machine["here"]:
        return Message("last seen") if machine["ends"] else Message("gone")
    return machine["phase"] or UNKNOWN


def _word(machine: Machine) -> str:
    word = machine["word"]
    return {"error": "!! ", "warning": "! "}.get(word["level"], "") + _say(word["text"]) if word else ""


def _gpus(machine: Machine, key: str) -> list[Any]:
    return [gpu[key] for gpu in machine["usage"].get("gpus", ()) if gpu.get(key) is not None]


def _celsius(machine: Machine) -> float | None:
    celsius: float | None = machine["usage"].get("temperature_celsius")
    return max(_gpus(machine, "temperature_celsius"), default=celsius)


COLUMNS = (
    Column(head=Message("machine"), cell=lambda row: row["name"], left=True),
    Column(head=Message("job"), cell=lambda row: row["job"], left=True),
    Column(head=Message("phase"), cell=_phase, left=True),
    Column(head=Message("share"), cell=lambda row: _percent(row["share"], of=1.0)),
    Column(head=Message("tokens/s"), cell=lambda row: _known(row["tokens_per_second"])),
    Column(head=Message("waits"), cell=lambda row: _percent(row["waiting_part"], of=1.0), wide=True),
    Column(head=Message("CPU"), cell=lambda row: _percent(row["usage"].get("cpu_percent"))),
    Column(head=Message("GPU"), cell=lambda row: _percent(max(_gpus(row, "busy_percent"), default=None))),
    Column(head=Message("°C"), cell=lambda row: _known(_celsius(row)), wide=True),
    Column(head=Message("up"), cell=lambda row: rate(row["sent_bytes_per_second"]), wide=True),
    Column(head=Message("down"), cell=lambda row: rate(row["received_bytes_per_second"]), wide=True),
    Column(head=Message("lag"), cell=_lag),
    Column(head=Message("last word"), cell=_word, left=True),
)


# Figures in words


def rate(bytes_per_second: float | None) -> str:
    """A rate in powers of 1000, as the speeds of networks are given."""
    if bytes_per_second is None:
        return UNKNOWN
    if bytes_per_second >= 1e6:
        return Message("{value:,.1f} MB/s", value=bytes_per_second / 1e6)
    return Message("{value:.0f} kB/s", value=bytes_per_second / 1e3)


def duration(seconds: float) -> Message:
    """A duration, rounded to one unit."""
    if seconds < 100:
        return Message("{number:.0f} s", number=seconds)
    if seconds < 100 * 60:
        return Message("{number:.0f} min", number=seconds / 60)
    if seconds < 48 * 3600:
        return Message("{number:.0f} h", number=seconds / 3600)
    return Message("{number:,.0f} d", number=seconds / 86_400)


def _known(value: float | None, unit: str = "") -> str:
    if value is None:
        return UNKNOWN
    return Message("{number:,.0f} {unit}" if unit else "{number:,.0f}", number=value, unit=unit)


def _percent(value: float | None, *, of: float = 100.0) -> str:
    return UNKNOWN if value is None else Message("{percent:.0f} %", percent=100 * value / of)


def _sizes(used: int | None, total: int | None) -> str:
    if used is None:
        return UNKNOWN
    if total is None:
        return Message("{used:.1f} GiB", used=used / GIB)
    return Message("{used:.1f}/{total:.1f} GiB", used=used / GIB, total=total / GIB)


def _text(*parts: str, style: str = "") -> Text:
    """The parts in the user's language, without markup."""
    return Text("  ".join(said for part in parts if (said := _say(part)) not in ("", UNKNOWN)) or UNKNOWN, style=style)


def _say(text: str) -> str:
    """A text in the user's language, on one line. An English reason from a file is recognised, never formatted."""
    return one_line(Message(text).in_language(language()))
