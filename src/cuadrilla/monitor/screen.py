"""What `cuadrilla monitor` shows, as lines of text: of this machine, or of the machines of a run.

Everything here is a pure function of what was read. On a terminal (`ScreenStyle.width`) lines fit, and those of this
machine have bars and small histories; elsewhere they are whole and plain, one for each device or machine. Texts that
come from others have been made harmless where they were read (`printable.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import cell_len, set_cell_size

from cuadrilla.host.gpus import GpuUsage
from cuadrilla.host.usage import Usage
from cuadrilla.link.base import COORDINATOR
from cuadrilla.messages import ENGLISH, Message, shown, translated
from cuadrilla.monitor.jobs import WorkNow
from cuadrilla.monitor.nodes import percent
from cuadrilla.monitor.run import RUNNING, Machine, RunNow

GIB = 2**30
BAR_CELLS, SPARK_CELLS = 20, 24
SPARKS = " ▁▂▃▄▅▆▇█"
UNKNOWN = "-"
GAP = "  "
LABEL_CELLS = 8
NO_PAST = (None,)
N = TypeVar("N", int, float)
MAX_DEVICE, MAX_WORD = 24, 120
LATE_SECONDS = 15.0
"""A machine says something every five seconds."""
HOT_CELSIUS = 90.0
BOLD, DIM, RED, YELLOW = "bold", "dim", "red", "yellow"
STATE_WORDS = {
    "running": Message("running"),
    "complete": Message("complete"),
    "stopped": Message("stopped"),
    "failed": Message("failed"),
    "waiting": Message("not begun"),
}
PHASE_WORDS = {
    "loading": Message("loading"),
    "receiving": Message("receiving"),
    "computing": Message("computing"),
    "sending": Message("sending"),
    "waiting": Message("waiting"),
    "paused": Message("paused"),
}


@dataclass(frozen=True, kw_only=True)
class ScreenStyle:
    """Whom lines are for. `width`: cells of a terminal, None elsewhere; `blocks`: whether its letters have `█`."""

    language: str = ENGLISH
    width: int | None = None
    height: int | None = None
    blocks: bool = True

    @property
    def live(self) -> bool:
        return self.width is not None


@dataclass(frozen=True, kw_only=True)
class ScreenLine:
    text: str
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineNow:
    """One sample of this machine. `past`: the samples before it, oldest first. `clock`: the time of day."""

    name: str
    clock: str
    processor: str
    usage: Usage
    past: Sequence[Usage] = ()
    gpus_silent: bool = False
    """There is something to ask about GPUs, and it does not answer."""


# This machine


def machine_lines(machine: MachineNow, *, style: ScreenStyle) -> list[ScreenLine]:
    """One line for each device."""
    usage = machine.usage
    samples = [*machine.past, usage]
    lines = [
        _device(
            Message("CPU"),
            usage.cpu_percent,
            [one.cpu_percent for one in samples],
            [_degrees(usage.temperature_celsius), "" if style.live else _memory_words(usage), machine.processor],
            style,
        ),
        *_memory_line(usage, samples, style),
        *[_gpu_line(place, gpu, samples, style) for place, gpu in enumerate(usage.gpus)],
        *([_device(Message("GPU"), None, (), [Message("does not answer")], style)] if machine.gpus_silent else []),
        *_disk_line(usage, style),
        *_network_line(usage, samples, style),
        *_battery_line(usage, style),
    ]
    if style.live:
        title = ScreenLine(text=f"{machine.name}{GAP}{machine.clock}", style=BOLD)
        return fitted([title, *lines], style=style)
    return [ScreenLine(text=f"{machine.clock}{GAP}{line.text}", style=line.style) for line in lines]


def _device(
    label: str, busy: float | None, past: Sequence[float | None], details: Iterable[str], style: ScreenStyle
) -> ScreenLine:
    """A label, how much of it is used, as a bar and over time, and more about it."""
    shown_busy = _words(Message("{percent:.0f} %", percent=busy) if busy is not None else Message("n/a"), style)
    parts = [set_cell_size(_words(label, style), LABEL_CELLS)]
    if style.live:
        parts.append(bar(busy, cells=BAR_CELLS, blocks=style.blocks))
    parts.append(f"{shown_busy:>5}")
    if style.live and style.blocks and past:
        parts.append(set_cell_size(sparkline(past, cells=SPARK_CELLS, most=100.0), SPARK_CELLS))
    parts += [_words(detail, style) for detail in details if detail]
    return ScreenLine(text=GAP.join(parts).rstrip(), style=YELLOW if busy is None else "")


def _memory_line(usage: Usage, samples: Sequence[Usage], style: ScreenStyle) -> list[ScreenLine]:
    if not style.live:
        return []  # it stands beside the processor
    past = [percent(one.memory_used_bytes, one.memory_bytes) for one in samples]
    return [_device(Message("memory"), past[-1], past, [_memory_words(usage, label=False)], style)]


def _memory_words(usage: Usage | GpuUsage, *, label: bool = True) -> Message:
    used, total = usage.memory_used_bytes, usage.memory_bytes
    if used is None and total is None:
        return Message("memory n/a")
    fields = {"used": _of_gib(used), "total": _of_gib(total)}
    if not label:
        return Message("{used}/{total} GiB", used=fields["used"], total=fields["total"])
    return Message("memory {used}/{total} GiB", used=fields["used"], total=fields["total"])


def _of_gib(value_bytes: int | None) -> Message | str:
    return UNKNOWN if value_bytes is None else Message("{size:.1f}", size=value_bytes / GIB)


def _gpu_line(place: int, gpu: GpuUsage, samples: Sequence[Usage], style: ScreenStyle) -> ScreenLine:
    past = [one.gpus[place].busy_percent if place < len(one.gpus) else None for one in samples]
    watts = "" if gpu.power_watts is None else Message("{watts:.0f} W", watts=gpu.power_watts)
    details = [_memory_words(gpu), _degrees(gpu.temperature_celsius), watts, gpu.name]
    line = _device(Message("GPU {index}", index=gpu.index), gpu.busy_percent, past, details, style)
    return ScreenLine(text=line.text, style=RED if (gpu.temperature_celsius or 0) >= HOT_CELSIUS else line.style)


def _disk_line(usage: Usage, style: ScreenStyle) -> list[ScreenLine]:
    free, total = usage.disk_free_bytes, usage.disk_bytes
    if free is None and usage.disk_read_bytes_per_second is None:
        return []
    details = [
        Message("{free:,.0f} GiB free", free=free / GIB) if free is not None else "",
        _rate_words(Message("reads"), usage.disk_read_bytes_per_second),
        _rate_words(Message("writes"), usage.disk_written_bytes_per_second),
    ]
    used = None if free is None or total is None else total - free
    line = _device(Message("disk"), percent(used, total), NO_PAST, details, style)
    return [ScreenLine(text=line.text, style=line.style if free is None else RED if free < GIB else "")]


def _network_line(usage: Usage, samples: Sequence[Usage], style: ScreenStyle) -> list[ScreenLine]:
    sent, received = usage.network_sent_bytes_per_second, usage.network_received_bytes_per_second
    if sent is None and received is None:
        return []
    past = [_sum([one.network_sent_bytes_per_second, one.network_received_bytes_per_second]) for one in samples]
    parts = [set_cell_size(_words(Message("network"), style), LABEL_CELLS)]
    if style.live:
        parts.append(" " * (BAR_CELLS + len(GAP) + 5))
        if style.blocks:
            most = max((value for value in past if value is not None), default=0.0)
            parts.append(set_cell_size(sparkline(past, cells=SPARK_CELLS, most=most), SPARK_CELLS))
    parts += [_rate_words(Message("sends"), sent, style), _rate_words(Message("receives"), received, style)]
    return [ScreenLine(text=GAP.join(parts).rstrip())]


def _battery_line(usage: Usage, style: ScreenStyle) -> list[ScreenLine]:
    if usage.battery_percent is None:
        return []
    word = Message("on battery") if usage.on_battery else Message("on power") if usage.on_battery is False else ""
    line = _device(Message("battery"), usage.battery_percent, NO_PAST, [word], style)
    return [ScreenLine(text=line.text, style=YELLOW if usage.on_battery else "")]


def _degrees(celsius: float | None) -> str:
    return "" if celsius is None else Message("{celsius:.0f} °C", celsius=celsius)


def _rate_words(label: Message, value: float | None, style: ScreenStyle | None = None) -> str:
    words = Message("{what} {rate}", what=label, rate=rate(value))
    return words if style is None else _words(words, style)


def rate(bytes_per_second: float | None) -> str:
    """As line rates are told: in thousands."""
    if bytes_per_second is None:
        return UNKNOWN
    if bytes_per_second >= 1e6:
        return Message("{value:,.1f} MB/s", value=bytes_per_second / 1e6)
    return Message("{value:.0f} kB/s", value=bytes_per_second / 1e3)


# The machines of a run


@dataclass(frozen=True, kw_only=True)
class ScreenColumn:
    """`rank`: on a narrow terminal columns of the highest rank go first."""

    head: Message
    cell: Callable[[Machine, RunNow], str]
    rank: int
    left: bool = False


def crew_lines(crew: RunNow, *, style: ScreenStyle, clock: str = "") -> list[ScreenLine]:
    """How far the run is, then one line for each machine."""
    nobody = Message("no machine has worked in this run yet")
    return _headed(run_line(crew, style), crew, style=style, clock=clock, nobody=nobody)


def work_lines(work: WorkNow, *, style: ScreenStyle, clock: str = "") -> list[ScreenLine]:
    """How far a queue or a search is, then one line for each of its machines."""
    nobody = Message("no machine has joined yet")
    return _headed(work_line(work, style), work.machines, style=style, clock=clock, nobody=nobody)


def nodes_lines(nodes: Sequence[str], *, style: ScreenStyle, clock: str = "") -> list[ScreenLine]:
    """Who has joined a crew that does nothing now."""
    told = _words(Message("machines of this crew: {names}", names=", ".join(nodes)), style)
    return fitted([ScreenLine(text=GAP.join([clock, told] if clock else [told]))], style=style)


def _headed(text: str, crew: RunNow, *, style: ScreenStyle, clock: str, nobody: Message) -> list[ScreenLine]:
    head = ScreenLine(text=GAP.join([*([clock] if clock else []), text]), style=BOLD)
    if not crew.machines:
        return fitted([head, ScreenLine(text=_words(nobody, style))], style=style)
    shown_machines = crew.machines
    if style.height is not None and len(shown_machines) > style.height - 3:
        shown_machines = shown_machines[: max(1, style.height - 4)]
    rows = _table(crew, shown_machines, style)
    lines = [head, ScreenLine(text=rows[0], style=DIM)]
    lines += [
        ScreenLine(text=text, style=_member_style(member, crew))
        for member, text in zip(shown_machines, rows[1:], strict=True)
    ]
    if len(shown_machines) < len(crew.machines):
        more = Message("... and {more:,} more machines", more=len(crew.machines) - len(shown_machines))
        lines.append(ScreenLine(text=_words(more, style), style=DIM))
    return fitted(lines, style=style)


def work_line(work: WorkNow, style: ScreenStyle) -> str:
    """A queue or a search in one line."""
    at_work = sum(member.here and member.name != COORDINATOR for member in work.machines.machines)
    parts: list[str] = [
        Message("search of {name}", name=work.title) if work.title else Message("queue"),
        STATE_WORDS.get(work.machines.state, UNKNOWN),
        Message("ended: {ended:,} of {number:,}", ended=work.num_ended, number=len(work.jobs)),
        Message("machines: {count:,}", count=at_work),
    ]
    return GAP.join(_words(part, style) for part in parts)


def run_line(crew: RunNow, style: ScreenStyle) -> str:
    """A run in one line."""
    parts: list[str] = [crew.name, STATE_WORDS.get(crew.state, UNKNOWN)]
    if crew.version is not None:
        parts.append(Message("step {version:,}", version=crew.version))
    if crew.loss is not None:
        parts.append(Message("loss {loss:.3f}", loss=crew.loss))
    if crew.bits_per_byte is not None:
        parts.append(Message("held-out {bits:.3f} bits/byte", bits=crew.bits_per_byte))
    if crew.tokens_per_second is not None:
        parts.append(Message("{speed:,.0f} tokens/s", speed=crew.tokens_per_second))
    if crew.state == RUNNING:
        at_work = sum(member.here and member.name != COORDINATOR for member in crew.machines)
        parts.append(Message("workers: {count:,}", count=at_work))
    elif crew.seen is not None:
        parts.append(Message("last seen {time} ago", time=duration(crew.time - crew.seen)))
    if crew.reason:
        parts.append(crew.reason)
    return GAP.join(_words(part, style) for part in parts)


def _member_style(member: Machine, crew: RunNow) -> str:
    if not member.here:
        return DIM
    late = member.seen is not None and member.node.time is not None and crew.time - member.seen > LATE_SECONDS
    hot = _highest_celsius(member) or 0.0
    return RED if hot >= HOT_CELSIUS else YELLOW if late else ""


def _table(crew: RunNow, machines: Sequence[Machine], style: ScreenStyle) -> list[str]:
    """The heads and a row for each machine; a column of which nothing is known is left out."""
    columns: dict[ScreenColumn, list[str]] = {}
    for column in COLUMNS:
        cells = [_words(column.cell(member, crew), style) for member in machines]
        if column.rank == 0 or any(cell not in ("", UNKNOWN) for cell in cells):
            columns[column] = [_words(column.head, style), *cells]
    while style.width is not None and len(columns) > 1 and _table_cells(columns) > style.width:
        least = max(column.rank for column in columns)
        columns = {column: cells for column, cells in columns.items() if column.rank != least}
    return [
        GAP.join(_aligned(cells[row], _cells(cells), left=column.left) for column, cells in columns.items()).rstrip()
        for row in range(len(machines) + 1)
    ]


def _table_cells(columns: Mapping[ScreenColumn, Sequence[str]]) -> int:
    """How wide it is if the last word, which may be cut, has a few letters."""
    widths = [LEAST_WORD if column.rank == WORD_RANK else _cells(cells) for column, cells in columns.items()]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _cells(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts))


def _aligned(text: str, cells: int, *, left: bool) -> str:
    return set_cell_size(text, cells) if left else " " * (cells - cell_len(text)) + text


def _phase(member: Machine, crew: RunNow) -> str:
    if member.paused:
        return PHASE_WORDS["paused"]
    if not member.here:
        return Message("gone") if crew.state == RUNNING else Message("last seen")
    return PHASE_WORDS.get(member.node.phase or "", UNKNOWN)


def _lag(member: Machine, crew: RunNow) -> str:
    return UNKNOWN if member.seen is None else duration(crew.time - member.seen)


def duration(seconds: float) -> Message:
    """Roughly, in one unit. Clocks of two machines may differ: nothing is newer than now."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return Message("{number:.0f} s", number=seconds)
    if seconds < 100 * 60:
        return Message("{number:.0f} min", number=seconds / 60)
    if seconds < 48 * 3600:
        return Message("{number:.0f} h", number=seconds / 3600)
    return Message("{number:,.0f} d", number=seconds / 86_400)


def _percent_words(value: float | None) -> str:
    return UNKNOWN if value is None else Message("{percent:.0f} %", percent=value)


def _part_words(value: float | None) -> str:
    return _percent_words(None if value is None else 100.0 * value)


def _memory_cell(usage: Usage) -> str:
    return _sizes(usage.memory_used_bytes, usage.memory_bytes)


def _gpu_memory_cell(usage: Usage) -> str:
    """Of all cards of the machine."""
    return _sizes(_sum(gpu.memory_used_bytes for gpu in usage.gpus), _sum(gpu.memory_bytes for gpu in usage.gpus))


def _sum(values: Iterable[N | None]) -> N | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _sizes(used: int | None, total: int | None) -> str:
    if used is None and total is None:
        return UNKNOWN
    return Message("{used}/{total}", used=_of_gib(used), total=_of_gib(total))


def _gpu_busy(usage: Usage) -> float | None:
    return max((gpu.busy_percent for gpu in usage.gpus if gpu.busy_percent is not None), default=None)


def _highest_celsius(member: Machine) -> float | None:
    usage = member.node.usage
    known = [one.temperature_celsius for one in usage.gpus] or [usage.temperature_celsius]
    return max((value for value in known if value is not None), default=None)


def _celsius(member: Machine) -> str:
    value = _highest_celsius(member)
    return UNKNOWN if value is None else Message("{celsius:.0f}", celsius=value)


def _watts(usage: Usage) -> str:
    watts = _sum(gpu.power_watts for gpu in usage.gpus)
    return UNKNOWN if watts is None else Message("{watts:.0f}", watts=watts)


def _round_trip(member: Machine) -> str:
    seconds = member.node.round_trip_seconds
    return UNKNOWN if seconds is None else Message("{number:,.0f} ms", number=1000 * seconds)


def _speed(member: Machine) -> str:
    speed = member.tokens_per_second
    return UNKNOWN if speed is None else Message("{speed:,.0f}", speed=speed)


def _word(member: Machine) -> str:
    if member.word is None:
        return ""
    mark = {"error": "!! ", "warning": "! "}.get(member.word.level, "")
    return Message("{mark}{text}", mark=mark, text=member.word.text[:MAX_WORD])


WORD_RANK, LEAST_WORD = 3, 16
COLUMNS = (
    ScreenColumn(head=Message("machine"), cell=lambda member, _: member.name, rank=0, left=True),
    ScreenColumn(
        head=Message("device"),
        cell=lambda member, _: member.node.facts.get("device", UNKNOWN)[:MAX_DEVICE],
        rank=8,
        left=True,
    ),
    ScreenColumn(head=Message("job"), cell=lambda member, _: Message("{text}", text=member.job), rank=1, left=True),
    ScreenColumn(head=Message("phase"), cell=_phase, rank=2, left=True),
    ScreenColumn(head=Message("share"), cell=lambda member, _: _part_words(member.share), rank=1),
    ScreenColumn(head=Message("tokens/s"), cell=lambda member, _: _speed(member), rank=1),
    ScreenColumn(head=Message("waits"), cell=lambda member, _: _part_words(member.node.waiting_part), rank=4),
    ScreenColumn(
        head=Message("CPU"),
        cell=lambda member, _: _percent_words(member.node.usage.cpu_percent),
        rank=5,
    ),
    ScreenColumn(head=Message("memory, GiB"), cell=lambda member, _: _memory_cell(member.node.usage), rank=9),
    ScreenColumn(
        head=Message("GPU"),
        cell=lambda member, _: _percent_words(_gpu_busy(member.node.usage)),
        rank=5,
    ),
    ScreenColumn(head=Message("GPU, GiB"), cell=lambda member, _: _gpu_memory_cell(member.node.usage), rank=9),
    ScreenColumn(head=Message("°C"), cell=lambda member, _: _celsius(member), rank=6),
    ScreenColumn(head=Message("W"), cell=lambda member, _: _watts(member.node.usage), rank=12),
    ScreenColumn(head=Message("up"), cell=lambda member, _: rate(member.node.sent_bytes_per_second), rank=7),
    ScreenColumn(head=Message("down"), cell=lambda member, _: rate(member.node.received_bytes_per_second), rank=7),
    ScreenColumn(head=Message("round trip"), cell=lambda member, _: _round_trip(member), rank=10),
    ScreenColumn(head=Message("lag"), cell=_lag, rank=1),
    ScreenColumn(head=Message("last word"), cell=lambda member, _: _word(member), rank=WORD_RANK, left=True),
)


# Any screen


def fitted(lines: Sequence[ScreenLine], *, style: ScreenStyle) -> list[ScreenLine]:
    """As many lines as the terminal has, none longer than it is wide: one that wraps would move the others."""
    shown_lines = list(lines if style.height is None else lines[: max(1, style.height - 1)])
    if style.width is None:
        return shown_lines
    return [ScreenLine(text=cropped(line.text, cells=style.width), style=line.style) for line in shown_lines]


def cropped(text: str, *, cells: int) -> str:
    return text if cell_len(text) <= cells else set_cell_size(text, max(0, cells - 1)) + "…"


def bar(percent_full: float | None, *, cells: int, blocks: bool = True) -> str:
    full = 0 if percent_full is None else round(cells * min(100.0, max(0.0, percent_full)) / 100)
    return ("█" if blocks else "#") * full + ("░" if blocks else ".") * (cells - full)


def sparkline(values: Sequence[float | None], *, cells: int, most: float) -> str:
    """The newest values, one letter each; a gap where nothing is known."""
    return "".join(
        " " if value is None else SPARKS[1 + min(7, int(8 * max(0.0, value) / most if most > 0 else 0))]
        for value in values[-cells:]
    )


def _words(text: str, style: ScreenStyle) -> str:
    """In the person's language. A reason that was written down in English is looked up, never formatted."""
    return shown(text, style.language) if isinstance(text, Message) else translated(text, style.language)
