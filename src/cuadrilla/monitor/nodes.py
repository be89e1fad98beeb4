"""What each machine of a run has last said about itself: the ends of the files `RUN/nodes/NAME.jsonl`.

The coordinator writes these files and rotates them (`NAME.jsonl.1` is the older half). A reader looks at the last
`TAIL_BYTES` of a machine's rows only, however long it has worked. What is in them came from other machines: numbers
have ranges, texts are one line of bounded length in which nothing acts on a terminal, torn lines are skipped.
"""

import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.host.gpus import bounded
from cuadrilla.host.usage import MOST_RATE, Usage, parse_usage
from cuadrilla.link.base import PHASES
from cuadrilla.monitor.follow import FileFollower, parsed
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, require_regular, worker_of_node_file

TAIL_BYTES = 2**16
"""Of a machine: some 200 rows, a quarter of an hour."""
MOST_FILE_BYTES = 2**21
"""Read at the most to find the facts of a session that began long ago; the writer stops at half of that."""
MOST_NODES = 1000
MOST_HISTORY = 120
MOST_LOG_LINES = 50
MOST_TEXT, MOST_NAME, MOST_FACTS, MOST_FACT = 500, 200, 20, 200
MOST_TIME = 1e11
MOST_SECONDS = 1e6
LEVELS = ("error", "warning", "info")
HELLO = b'"hello"'


@dataclass(frozen=True, kw_only=True)
class NodeLine:
    time: float
    level: str
    text: str


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
    log: tuple[NodeLine, ...] = ()
    """Oldest first."""
    cut_lines: int = 0
    """Lines of its log that the coordinator has dropped, as far as the rows go back."""


class NodesReader:
    """Reads a run's machines again and again: what has been added since, from the second time on."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.nodes
        self._tails: dict[Path, _NodeTail] = {}

    def read(self) -> list[NodeNow]:
        """By name. A run without such files has no machines to show."""
        paths = node_files(self._folder)
        for path in paths:
            if path not in self._tails:
                self._tails[path] = _tail_of(path)
            self._tails[path].follow()
        return [self._tails[path].now() for path in paths]


def read_nodes(run: RunDir) -> list[NodeNow]:
    """Once. Never raises because of what the files hold."""
    return NodesReader(run).read()


def node_files(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    except OSError:
        return []
    return found[:MOST_NODES]


def node_from(name: str, rows: Iterable[Mapping[str, Any]]) -> NodeNow:
    """From a machine's rows, oldest first."""
    tail = _NodeTail(name)
    for row in rows:
        tail.take(row)
    return tail.now()


@dataclass
class _NodeTail:
    """What is kept of a machine's rows."""

    name: str
    follower: FileFollower | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    heard: float | None = None
    used: deque[tuple[float, Mapping[str, Any], Usage, dict[str, float | None]]] = field(
        default_factory=lambda: deque(maxlen=MOST_HISTORY)
    )
    log: deque[NodeLine] = field(default_factory=lambda: deque(maxlen=MOST_LOG_LINES))
    cut_lines: int = 0

    def follow(self) -> None:
        more = self.follower is not None
        while more and self.follower is not None:
            news = self.follower.read()
            if news.anew:
                self.used.clear()
                self.log.clear()
            for row in news.rows:
                self.take(row)
            more = news.more

    def take(self, row: Mapping[str, Any]) -> None:
        at = bounded(row.get("time"), least=1.0, most=MOST_TIME)
        if at is None:
            return
        self.heard = at if self.heard is None else max(self.heard, at)
        match row.get("kind"):
            case "usage":
                usage = parse_usage(row)
                self.used.append((at, row, usage, figures(row, usage)))
            case "log":
                level, text = row.get("level"), row.get("text")
                known = level if isinstance(level, str) and level in LEVELS else "info"
                if isinstance(text, str):
                    self.log.append(NodeLine(time=at, level=known, text=one_line(text, most=MOST_TEXT)))
            case "cut":
                self.cut_lines += int(bounded(row.get("lines"), most=1e9) or 0)
            case "hello":
                self.facts = parse_facts(row.get("facts"))

    def now(self) -> NodeNow:
        at, newest, usage, _ = self.used[-1] if self.used else (None, {}, Usage(), {})
        phase = newest.get("phase")
        return NodeNow(
            name=one_line(self.name, most=MOST_NAME),
            heard=self.heard,
            time=at,
            usage=usage,
            phase=phase if isinstance(phase, str) and phase in PHASES else None,
            waiting_part=bounded(newest.get("waiting_part"), most=1.0),
            sent_bytes_per_second=bounded(newest.get("sent_bytes_per_second"), most=MOST_RATE),
            received_bytes_per_second=bounded(newest.get("received_bytes_per_second"), most=MOST_RATE),
            round_trip_seconds=bounded(newest.get("round_trip_seconds"), most=MOST_SECONDS),
            facts=self.facts,
            history={key: tuple(one[3][key] for one in self.used) for key in (self.used[0][3] if self.used else ())},
            times=tuple(one[0] for one in self.used),
            log=tuple(self.log),
            cut_lines=self.cut_lines,
        )


def _tail_of(path: Path) -> _NodeTail:
    """With what the older file has to say while the newer one is short, and whom the newest session is of."""
    older = path.with_name(f"{path.name}.1")
    follower = FileFollower(path, older=older, tail_bytes=TAIL_BYTES)
    tail = _NodeTail(worker_of_node_file(path.name), follower, facts=old_facts(path))
    left = TAIL_BYTES - len(_tail(path, TAIL_BYTES))
    for row in _rows(_tail(older, left)) if left > 0 else ():
        tail.take(row)
    return tail


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
