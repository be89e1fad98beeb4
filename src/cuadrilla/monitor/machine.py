"""One machine of a run as its file in `nodes/` tells of it, followed: newest figures, a short history, its log.

What a row says is bounded before it is kept: numbers by `parse_usage`, words by their length. A name is text.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from cuadrilla.host.usage import parse_usage, usage_data
from cuadrilla.link.base import PHASES
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.nodes import LEVELS, old_facts, parse_facts
from cuadrilla.printable import one_line
from cuadrilla.rundir import worker_of_node_file

TAIL_BYTES = 3 * 2**15
"""Of a machine's file to begin with: about ten minutes."""
MOST_POINTS = 120
MOST_LINES = 300
MOST_TEXT = 500
MOST_GPUS = 64
MOST_NAME = 120
MOST_TIME = 1e11
MOST_RATE = 1e15
LINK_FIGURES = {
    "waiting_part": 1.0,
    "sent_bytes_per_second": MOST_RATE,
    "received_bytes_per_second": MOST_RATE,
    "round_trip_seconds": 1e6,
}
"""What a worker adds to its usage, with the highest value that is believed."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """`dropped`: so many lines were left out here."""

    number: int
    time: float
    node: str
    level: str
    text: str
    dropped: int = 0


@dataclass(kw_only=True)
class WatchedNode:
    """`name`: of its file."""

    name: str
    follower: FileFollower
    seen: float = 0.0
    """When its last row was written; 0: never."""
    usage: dict[str, Any] = field(default_factory=dict)
    phase: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    points: deque[tuple[int, list[float | None]]] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    """Numbered: time, busy part of the processor, of the busiest GPU, waiting part."""
    lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    _looked_back: bool = False

    @property
    def last_line(self) -> LogLine | None:
        return self.lines[-1] if self.lines else None

    def refresh(self, numbers: Iterator[int]) -> None:
        """Take in new rows, each with the next of `numbers`."""
        news = self.follower.read()
        if news.anew:
            self.points.clear()
            self.lines.clear()
        for row in news.rows:
            self._take(row, next(numbers))
        newest = next((row for row in reversed(news.rows) if row.get("kind") == "usage"), None)
        if newest is not None:
            self._take_usage(newest)
        if not self._looked_back:
            self._looked_back = True
            self.facts = self.facts or dict(old_facts(self.follower.path))  # it may have said hello long ago

    def _take(self, row: Mapping[str, Any], number: int) -> None:
        at = number_of(row.get("time"), most=MOST_TIME)
        if at is None:
            return
        self.seen = max(self.seen, at)
        match row.get("kind"):
            case "usage":
                self.points.append((number, _point(row, at)))
            case "log":
                level = str(row.get("level"))
                self._say(number, at, level if level in LEVELS else "info", short(row.get("text")))
            case "cut":
                dropped = int(number_of(row.get("lines"), most=1e12) or 0)
                self._say(number, at, "warning", "", dropped=dropped)
            case "hello":
                self.facts = parse_facts(row.get("facts"))

    def _take_usage(self, row: Mapping[str, Any]) -> None:
        self.usage = usage_data(parse_usage(row))
        for key, most in LINK_FIGURES.items():
            if (value := number_of(row.get(key), most=most)) is not None:
                self.usage[key] = value
        phase = row.get("phase")
        self.phase = phase if isinstance(phase, str) and phase in PHASES else ""

    def _say(self, number: int, at: float, level: str, text: str, *, dropped: int = 0) -> None:
        line = LogLine(number=number, time=at, node=self.name, level=level, text=text, dropped=dropped)
        self.lines.append(line)


def node_of(path: Path) -> WatchedNode:
    older = path.with_name(path.name + ".1")
    follower = FileFollower(path, older=older, tail_bytes=TAIL_BYTES)
    return WatchedNode(name=short(worker_of_node_file(path.name), most=MOST_NAME), follower=follower)


def _point(row: Mapping[str, Any], at: float) -> list[float | None]:
    gpus = row.get("gpus")
    named = gpus[:MOST_GPUS] if isinstance(gpus, list) else []
    busy = [part for gpu in named if isinstance(gpu, dict) and (part := _part(gpu.get("busy_percent"))) is not None]
    waiting = number_of(row.get("waiting_part"), most=1.0)
    return [at, _part(row.get("cpu_percent")), max(busy, default=None), waiting]


def _part(percent: object) -> float | None:
    value = number_of(percent, most=100.0)
    return None if value is None else round(value / 100, 3)


def number_of(value: object, *, most: float) -> float | None:
    """A number from 0 to `most`, else None: JSON knows integers beyond any float, and infinities."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most:
        with contextlib.suppress(OverflowError):
            return float(value)
    return None


def short_name(name: str) -> str:
    """Names come again in every row."""
    return _short_name(name[:MOST_NAME])


@lru_cache(maxsize=4096)
def _short_name(name: str) -> str:
    return short(name, most=MOST_NAME)


def short(value: object, *, most: int = MOST_TEXT) -> str:
    """Text of one line."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return one_line(text[:most])
