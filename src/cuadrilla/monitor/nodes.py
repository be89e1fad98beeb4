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
from pathlib import Path
from typing import Any

from cuadrilla.host.gpus import bounded
from cuadrilla.host.usage import MOST_RATE, Usage, parse_usage
from cuadrilla.link.base import PHASES
from cuadrilla.monitor.follow import FileFollower, parsed
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, require_regular, worker_of_node_file

TAIL_BYTES = 3 * 2**15
"""Of a machine: some 300 rows, a quarter of an hour and more."""
MAX_FILE_BYTES = 2**21
"""Read at the most to find the facts of a session that began long ago; the writer stops at half of that."""
MAX_NODES, MAX_ENTRIES = 1000, 10_000
"""Machines of a run, and names in its folder that are looked at."""
MAX_HISTORY = 120
MAX_LOG_LINES = 300
MAX_TEXT, MAX_NAME, MAX_FACTS, MAX_FACT = 500, 120, 20, 200
MAX_TIME = 1e11
MAX_SECONDS = 1e6
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


LINK_FIGURES = {
    "waiting_part": 1.0,
    "sent_bytes_per_second": MOST_RATE,
    "received_bytes_per_second": MOST_RATE,
    "round_trip_seconds": MAX_SECONDS,
}
"""What a worker adds to its usage, with the highest value that is believed."""


class NodesReader:
    """Reads a run's machines again and again: what has been added since, from the second time on.

    `numbers`: each usage row and each line of a log gets the next one, so that a caller can tell what is new.
    """

    def __init__(self, run: RunDir, *, numbers: Iterator[int] | None = None) -> None:
        self._folder = run.nodes
        self._numbers = numbers or itertools.count(1)
        self._tails: dict[Path, NodeTail] = {}

    def read(self) -> list[NodeNow]:
        """By name. A run without such files has no machines to show."""
        for path in node_files(self._folder):
            if path not in self._tails and len(self._tails) < MAX_NODES:
                self._tails[path] = NodeTail.of(path, numbers=self._numbers)
        for tail in self._tails.values():  # one that is being rotated has no file for a moment
            tail.follow()
        return [self._tails[path].now() for path in sorted(self._tails)]


def node_files(folder: Path) -> list[Path]:
    """One for each machine, by name; a file may be there as its older half only."""
    try:
        with os.scandir(folder) as entries:
            names = {entry.name.removesuffix(".1") for entry in itertools.islice(entries, MAX_ENTRIES)}
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(".jsonl")][:MAX_NODES]


@dataclass(frozen=True, kw_only=True)
class _Used:
    """A usage row that is kept."""

    number: int
    time: float
    figures: Mapping[str, float | None]


@dataclass
class NodeTail:
    """What is kept of a machine's rows."""

    name: str
    follower: FileFollower | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    facts: Mapping[str, str] = field(default_factory=dict)
    heard: float | None = None
    used: deque[_Used] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    newest: tuple[float, Mapping[str, Any], Usage] | None = None
    """Of the usage rows."""
    lines: deque[NodeLine] = field(default_factory=lambda: deque(maxlen=MAX_LOG_LINES))
    cut_lines: int = 0
    _now: NodeNow | None = None

    @classmethod
    def of(cls, path: Path, *, numbers: Iterator[int]) -> "NodeTail":
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
        at = bounded(row.get("time"), least=1.0, most=MAX_TIME)
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
        said = one_line(text, most=MAX_TEXT)
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
            name=one_line(self.name, most=MAX_NAME),
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
        raw = _tail(file, MAX_FILE_BYTES)
        end = len(raw)
        while (found := raw.rfind(HELLO, 0, end)) >= 0:
            first, last = raw.rfind(b"\n", 0, found) + 1, raw.find(b"\n", found)
            for row in parsed(raw[first : last if last >= 0 else len(raw)]):
                if row.get("kind") == "hello":
                    return parse_facts(row.get("facts"))
            end = first
    return {}


def figures(row: Mapping[str, Any], usage: Usage) -> dict[str, float | None]:
    """What a small curve shows of a usage row, in percent."""
    return {
        "cpu_percent": usage.cpu_percent,
        "gpu_percent": max((gpu.busy_percent for gpu in usage.gpus if gpu.busy_percent is not None), default=None),
        "waiting_percent": percent(bounded(row.get("waiting_part"), most=1.0), 1.0),
    }


def percent(used: float | None, total: float | None) -> float | None:
    return 100.0 * used / total if used is not None and total else None


def parse_facts(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    told = [(key, text) for key, text in value.items() if isinstance(key, str) and isinstance(text, str)]
    return {one_line(key, most=MAX_FACT): one_line(text, most=MAX_FACT) for key, text in told[:MAX_FACTS]}
