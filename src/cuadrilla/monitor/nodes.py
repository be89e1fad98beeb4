"""What each machine of a run has said about itself: the files `RUN/nodes/NAME.jsonl`, followed.

The coordinator writes these files and rotates them (`NAME.jsonl.1` is the older half). All that shows machines reads
them here. The first read looks at the last `TAIL_BYTES` of a machine's rows, however long it has worked; each later
one costs what the files have grown by. What is in them came from other machines: numbers have ranges, texts are one
line of bounded length in which nothing acts on a terminal, torn lines are skipped.
"""

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cuadrilla.host.gpus import bounded
from cuadrilla.host.usage import MOST_RATE, Usage, parse_usage, usage_data
from cuadrilla.link.base import PHASES
from cuadrilla.monitor.follow import FileFollower, parsed
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, require_regular, worker_of_node_file

TAIL_BYTES = 3 * 2**15
"""Of a machine: some 300 rows, a quarter of an hour and more."""
MOST_FILE_BYTES = 2**21
"""Read at the most to find the facts of a session that began long ago; the writer stops at half of that."""
MOST_NODES, MOST_ENTRIES = 1000, 10_000
"""Machines, and names in the folder that are looked at."""
MOST_HISTORY = 120
MOST_LOG_LINES = 300
MOST_TEXT, MOST_NAME, MOST_FACTS, MOST_FACT = 500, 120, 20, 200
MOST_TIME = 1e11
MOST_SECONDS = 1e6
LEVELS = ("error", "warning", "info")
HELLO = b'"hello"'


@dataclass(frozen=True, kw_only=True)
class NodeLine:
    """`dropped`: so many lines were left out here. `number`: of `NodesReader`."""

    time: float
    level: str
    text: str
    dropped: int = 0
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    """A machine as its newest rows have it. Times are unix seconds of the coordinator's clock."""

    name: str
    heard: float | None = None
    """When its newest row of any kind was written."""
    time: float | None = None
    """Of the newest usage row, from which the following are."""
    usage: Usage = field(default_factory=Usage)
    phase: str | None = None
    waiting_part: float | None = None
    sent_bytes_per_second: float | None = None
    received_bytes_per_second: float | None = None
    round_trip_seconds: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Of its newest session: device, processor, system, torch, cuadrilla."""
    history: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """By name of a figure (`figures`), oldest first, as many of each as of `times`."""
    times: tuple[float, ...] = ()
    numbers: tuple[int, ...] = ()
    """Of the rows of `times`."""
    lines: tuple[NodeLine, ...] = ()
    """Its log, oldest first, with a line for each place where the coordinator has dropped some."""
    cut_lines: int = 0
    """Lines of its log that the coordinator has dropped, as far as the rows go back."""

    @property
    def log(self) -> tuple[NodeLine, ...]:
        """What it said."""
        return tuple(line for line in self.lines if not line.dropped)

    @cached_property
    def usage_and_link(self) -> dict[str, Any]:
        """What is known of its newest usage and of its link, as plain data."""
        link = {name: getattr(self, name) for name in LINK_FIGURES}
        return usage_data(self.usage) | {name: value for name, value in link.items() if value is not None}


LINK_FIGURES = {
    "waiting_part": 1.0,
    "sent_bytes_per_second": MOST_RATE,
    "received_bytes_per_second": MOST_RATE,
    "round_trip_seconds": MOST_SECONDS,
}
"""What a worker adds to its usage, with the highest value that is believed."""


class NodesReader:
    """Reads a run's machines again and again: what has been added since, from the second time on.

    `numbers`: each usage row and each line of a log gets the next one, so that a caller can tell what is new. `most`:
    machines to read.
    """

    def __init__(self, run: RunDir, *, numbers: Iterator[int] | None = None, most: int = MOST_NODES) -> None:
        self._folder = run.nodes
        self._numbers = numbers or itertools.count(1)
        self._most = most
        self._tails: dict[Path, _NodeTail] = {}

    def read(self) -> list[NodeNow]:
        """By name. A run without such files has no machines to show."""
        for path in node_files(self._folder):
            if path not in self._tails and len(self._tails) < self._most:
                self._tails[path] = _NodeTail.of(path, numbers=self._numbers)
        for tail in self._tails.values():  # one that is being rotated has no file for a moment
            tail.follow()
        return [self._tails[path].now() for path in sorted(self._tails)]


def read_nodes(run: RunDir) -> list[NodeNow]:
    """Once. Never raises because of what the files hold."""
    return NodesReader(run).read()


def node_files(folder: Path) -> list[Path]:
    """One for each machine, by name; a file may be there as its older half only."""
    try:
        with os.scandir(folder) as entries:
            names = {entry.name.removesuffix(".1") for entry in itertools.islice(entries, MOST_ENTRIES)}
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(".jsonl")][:MOST_NODES]


def node_from(name: str, rows: Iterable[Mapping[str, Any]]) -> NodeNow:
    """From a machine's rows, oldest first."""
    tail = _NodeTail(name)
    for row in rows:
        tail.take(row)
    return tail.now()


@dataclass(frozen=True, kw_only=True)
class _Used:
    """A usage row that is kept."""

    number: int
    time: float
    figures: Mapping[str, float | None]


@dataclass
class _NodeTail:
    """What is kept of a machine's rows."""

    name: str
    follower: FileFollower | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    facts: Mapping[str, str] = field(default_factory=dict)
    heard: float | None = None
    used: deque[_Used] = field(default_factory=lambda: deque(maxlen=MOST_HISTORY))
    newest: tuple[float, Mapping[str, Any], Usage] | None = None
    """Of the usage rows."""
    lines: deque[NodeLine] = field(default_factory=lambda: deque(maxlen=MOST_LOG_LINES))
    cut_lines: int = 0
    _now: NodeNow | None = None

    @classmethod
    def of(cls, path: Path, *, numbers: Iterator[int]) -> "_NodeTail":
        """With what the older file has to say while the newer one is short, and whom the newest session is of."""
        older = path.with_name(f"{path.name}.1")
        follower = FileFollower(path, older=older, tail_bytes=TAIL_BYTES)
        tail = cls(worker_of_node_file(path.name), follower, numbers)
        left = TAIL_BYTES - len(_tail(path, TAIL_BYTES))
        for row in _rows(_tail(older, left)) if left > 0 else ():
            tail.take(row)
        tail.follow()
        tail.facts = tail.facts or old_facts(path)
        return tail

    def follow(self) -> None:
        """What one read takes in: the writer's files are far smaller, and one that grows for ever holds nobody up."""
        if self.follower is None:
            return
        news = self.follower.read()
        if news.anew:
            self.used.clear()
            self.lines.clear()
            self.newest = self._now = None
        for row in news.rows:
            self.take(row)

    def take(self, row: Mapping[str, Any]) -> None:
        at = bounded(row.get("time"), least=1.0, most=MOST_TIME)
        if at is None:
            return
        self._now = None
        self.heard = at  # the last row: a clock may have been ahead for a while
        match row.get("kind"):
            case "usage":
                usage = parse_usage(row)
                self.newest = (at, row, usage)
                self.used.append(_Used(number=next(self.numbers), time=at, figures=figures(row, usage)))
            case "log":
                level, text = row.get("level"), row.get("text")
                if isinstance(text, str):
                    self._say(at, level if isinstance(level, str) and level in LEVELS else "info", text)
            case "cut":
                if dropped := int(bounded(row.get("lines"), most=1e9) or 0):
                    self.cut_lines += dropped
                    self._say(at, "warning", "", dropped=dropped)
            case "hello":
                self.facts = parse_facts(row.get("facts"))

    def _say(self, at: float, level: str, text: str, *, dropped: int = 0) -> None:
        said = one_line(text, most=MOST_TEXT)
        self.lines.append(NodeLine(time=at, level=level, text=said, dropped=dropped, number=next(self.numbers)))

    def now(self) -> NodeNow:
        self._now = self._now or self._as_read()
        return self._now

    def _as_read(self) -> NodeNow:
        at, row, usage = self.newest or (None, {}, Usage())
        phase = row.get("phase")
        link = {name: bounded(row.get(name), most=most) for name, most in LINK_FIGURES.items()}
        curves = figures({}, Usage()) if self.used else {}
        return NodeNow(
            name=one_line(self.name, most=MOST_NAME),
            heard=self.heard,
            time=at,
            usage=usage,
            phase=phase if isinstance(phase, str) and phase in PHASES else None,
            waiting_part=link["waiting_part"],
            sent_bytes_per_second=link["sent_bytes_per_second"],
            received_bytes_per_second=link["received_bytes_per_second"],
            round_trip_seconds=link["round_trip_seconds"],
            facts=self.facts,
            history={key: tuple(one.figures[key] for one in self.used) for key in curves},
            times=tuple(one.time for one in self.used),
            numbers=tuple(one.number for one in self.used),
            lines=tuple(self.lines),
            cut_lines=self.cut_lines,
        )


def _tail(path: Path, most_bytes: int) -> bytes:
    """The file's last bytes, from the beginning of a line on."""
    try:
        require_regular(path)
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            raw = file.read(most_bytes)
    except OSError:
        return b""
    return raw if size <= most_bytes else raw.partition(b"\n")[2]


def _rows(raw: bytes) -> Iterable[dict[str, Any]]:
    for line in raw.split(b"\n"):
        yield from parsed(line)


def old_facts(path: Path) -> Mapping[str, str]:
    """Of the newest `hello`, wherever in a machine's two files it is."""
    for file in (path, path.with_name(f"{path.name}.1")):
        raw = _tail(file, MOST_FILE_BYTES)
        end = len(raw)
        while (found := raw.rfind(HELLO, 0, end)) >= 0:
            first, last = raw.rfind(b"\n", 0, found) + 1, raw.find(b"\n", found)
            for row in parsed(raw[first : last if last >= 0 else len(raw)]):
                if row.get("kind") == "hello":
                    return parse_facts(row.get("facts"))
            end = first
    return {}


def figures(row: Mapping[str, Any], usage: Usage) -> dict[str, float | None]:
    """What a small curve may show of a usage row; parts are percent."""
    waiting = bounded(row.get("waiting_part"), most=1.0)
    gpu = _highest(one.busy_percent for one in usage.gpus)
    degrees = _highest(one.temperature_celsius for one in usage.gpus)
    return {
        "cpu_percent": usage.cpu_percent,
        "memory_percent": percent(usage.memory_used_bytes, usage.memory_bytes),
        "gpu_percent": gpu,
        "temperature_celsius": usage.temperature_celsius if degrees is None else degrees,
        "power_watts": _sum(one.power_watts for one in usage.gpus),
        "waiting_percent": None if waiting is None else 100.0 * waiting,
        "sent_bytes_per_second": bounded(row.get("sent_bytes_per_second"), most=MOST_RATE),
        "received_bytes_per_second": bounded(row.get("received_bytes_per_second"), most=MOST_RATE),
    }


def percent(used: float | None, total: float | None) -> float | None:
    return 100.0 * used / total if used is not None and total else None


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def parse_facts(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    told = [(key, text) for key, text in value.items() if isinstance(key, str) and isinstance(text, str)]
    return {one_line(key, most=MOST_FACT): one_line(text, most=MOST_FACT) for key, text in told[:MOST_FACTS]}
