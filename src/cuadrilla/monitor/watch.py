"""A run directory, followed: what the dashboard and Prometheus show of a run that trains, has ended or was broken off.

It reads files only, each from where it stopped the last time (`follow.py`), and keeps a bounded picture: curves in
`Series`, the newest events, samples and log lines, one row for each machine. A reader asks for `news` since its place.
"""

import contextlib
import itertools
import json
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.monitor.crew import state_of
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.machine import MOST_NAME, MOST_TIME, LogLine, WatchedNode, node_of, number_of, short, short_name
from cuadrilla.monitor.nodes import node_files
from cuadrilla.monitor.report import mean_shares
from cuadrilla.monitor.series import Series, SeriesPlace
from cuadrilla.rundir import RunDir

MOST_VERSION = 2**53
MOST_VALUE = 1e300
POINTS, SHARE_POINTS = 1200, 300
"""Of a curve, and of each machine's shares: a page is not wider."""
MOST_FIGURES, MOST_NODES = 40, 256
MOST_EVENTS, MOST_SAMPLES, MOST_LOG = 500, 100, 1000
MOST_SAMPLE = 8000
MOST_DETAIL = 400
NEWEST = 20
"""Steps of which a machine's share is the mean."""
REFRESH_SECONDS = 0.5
NODES_SECONDS = 2.0
FIGURE = re.compile(r"[a-z0-9_]{1,64}")
QUIET_EVENTS = ("checkpoint",)
RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class WatchPlace:
    """How much a reader has been told."""

    figures: SeriesPlace = field(default_factory=SeriesPlace)
    shares: SeriesPlace = field(default_factory=SeriesPlace)
    number: int = 0
    """Of the newest event, sample, log line and point."""
    head: str = ""
    crew: str = ""
    life: int = 0


@dataclass(kw_only=True)
class Attendant:
    """A machine as the run's events and rows tell of it."""

    is_here: bool = False
    joined: int = 0
    lost: int = 0
    reason: str = ""


@dataclass
class WatchedRun:
    """`refresh` and `news` may be called from any thread."""

    run: RunDir
    state: str = "unknown"
    last: dict[str, float] = field(default_factory=dict)
    """The newest of each figure of `metrics.jsonl`."""
    figures: Series = field(default_factory=lambda: Series(POINTS, MOST_FIGURES))
    shares: Series = field(default_factory=lambda: Series(SHARE_POINTS, MOST_NODES, fills=True))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    nodes: dict[str, WatchedNode] = field(default_factory=dict)
    crew: dict[str, Attendant] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Events by name."""
    updated: float = 0.0
    is_behind: bool = True
    """More was in the files than one refresh takes in."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Iterator[int] = itertools.count(1)
        self._number = 0
        self._life = 0
        self._version = 0  # of the events
        self._newest: deque[dict[str, float]] = deque(maxlen=NEWEST)
        self._metrics, self._events = FileFollower(self.run.metrics), FileFollower(self.run.events)
        self._refreshed = self._looked_for_nodes = float("-inf")

    @property
    def name(self) -> str:
        return short(self.run.path.resolve().name, most=MOST_NAME)

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    def refresh(self) -> None:
        """Take in what the run has written since; not more often than twice a second."""
        with self._lock:
            now = time.monotonic()
            if now - self._refreshed < REFRESH_SECONDS and not self.is_behind:
                return
            self._take_events()
            self._take_metrics()
            self._take_nodes(now)
            self.state = state_of(self.run)
            self._refreshed = time.monotonic()

    def news(self, place: WatchPlace) -> tuple[dict[str, Any], WatchPlace]:
        """By name, what a reader at this place lacks; and where it is then."""
        with self._lock:
            if place.life != self._life:
                place = WatchPlace(life=self._life)
            found: dict[str, Any] = {"anew": True} if place == WatchPlace(life=self._life) else {}
            figures, at_figures = self.figures.since(place.figures)
            shares, at_shares = self.shares.since(place.shares)
            since = place.number
            head, crew = self._head(), self.rows()
            told = (json.dumps(head), json.dumps(crew))
            log = [asdict(line) for line in self._log() if line.number > since]
            parts = {
                "head": head if told[0] != place.head else None,
                "crew": crew if told[1] != place.crew else None,
                "figures": figures,
                "shares": shares,
                "points": {name: new for name, node in self.nodes.items() if (new := _points(node, since))},
                "events": [event for event in self.events if event["number"] > since],
                "samples": [sample for sample in self.samples if sample["number"] > since],
                "log": log,
            }
            found |= {name: part for name, part in parts.items() if part}
            here = WatchPlace(
                figures=at_figures, shares=at_shares, number=self._number, head=told[0], crew=told[1], life=self._life
            )
            return found, here

    def _log(self) -> list[LogLine]:
        """The newest lines of all machines, in the order in which they came."""
        lines = itertools.chain.from_iterable(node.lines for node in self.nodes.values())
        return sorted(lines, key=lambda line: (line.time, line.number))[-MOST_LOG:]

    def _head(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "updated": self.updated, "behind": self.is_behind, **self.last}

    def rows(self) -> list[dict[str, Any]]:
        """One for each machine: those who are here first. The coordinator's own has a row, too, and no work."""
        names = {*self.crew, *self.nodes}
        shares = self._mean_shares()
        speed = self.last.get("tokens_per_second", 0.0)
        rows = [self._row(name, shares.get(name, 0.0), speed) for name in names]
        return sorted(rows, key=lambda row: (not row["here"], row["name"]))

    def _row(self, name: str, share: float, speed: float) -> dict[str, Any]:
        attendant = self.crew.get(name, Attendant(is_here=self.is_running))
        here = attendant.is_here and self.is_running
        row: dict[str, Any] = {"name": name, "here": here, "works": name in self.crew or not self.crew}
        row |= {"share": round(share, 4)}
        row |= {"tokens_per_second": round(share * speed, 1) if here else 0.0}
        row |= {"joined": attendant.joined, "lost": attendant.lost, "reason": attendant.reason}
        if node := self.nodes.get(name):
            row |= {"seen": node.seen, "phase": node.phase if here else "", "usage": node.usage, "facts": node.facts}
            if line := node.last_line:
                row |= {"word": line.text, "word_level": line.level, "word_dropped": line.dropped}
        return row

    def _mean_shares(self) -> dict[str, float]:
        """A step of one worker names nobody."""
        if alone := self._alone():
            return {alone: 1.0} if self.last else {}
        return mean_shares([{"shares": each} for each in self._newest]) if self._newest else {}

    def _alone(self) -> str:
        """Who does everything, if there is one."""
        here = [name for name, attendant in self.crew.items() if attendant.is_here] if self.crew else list(self.nodes)
        return here[0] if len(here) == 1 else ""

    def _next(self) -> int:
        self._number = next(self._numbers)
        return self._number

    # What was read

    def _take_metrics(self) -> None:
        news = self._metrics.read()
        self.is_behind = news.more
        if news.anew:
            self._forget_metrics()
        for row in news.rows:
            version = row.get("version")
            if isinstance(version, int) and not isinstance(version, bool) and 0 <= version < MOST_VERSION:
                self._take_row(version, row)
        if news.rows:
            self.updated = _modified(self.run.metrics)

    def _take_row(self, version: int, row: Mapping[str, Any]) -> None:
        figures = {key: value for key, value in row.items() if _is_figure(key, value)}
        self.last |= {key: value for key, value in figures.items() if key in self.last or len(self.last) < MOST_FIGURES}
        figures.pop("version", None)
        self.figures.add(version, figures)
        shares = row.get("shares")
        if isinstance(shares, dict):
            parts = {short_name(name): part for name, part in shares.items() if _is_number(part)}
            self.shares.add(version, parts)
            self._newest.append(parts)
        elif len(self.shares) and row.get("workers") == 1 and (alone := self._alone()):
            self.shares.add(version, {alone: 1.0})
        elif len(self.shares) and row.get("workers") == 1:  # nobody is named: one of several did it all
            self.shares.skip(version)
        sample = row.get("sample")
        if isinstance(sample, str):
            self.samples.append({"number": self._next(), "version": version, "text": sample[:MOST_SAMPLE]})

    def _forget_metrics(self) -> None:
        self._life += 1
        self.last = {}
        self.figures.clear()
        self.shares.clear()
        self.samples.clear()
        self._newest.clear()

    def _take_events(self) -> None:
        news = self._events.read()
        if news.anew:
            self._life += 1
            self.events.clear()
            self.crew, self.counts, self._version = {}, {}, 0
        for row in news.rows:
            self._take_event(row)

    def _take_event(self, row: Mapping[str, Any]) -> None:
        kind = short(row.get("event"), most=MOST_NAME)
        if kind in self.counts or len(self.counts) < MOST_FIGURES:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        version = number_of(row.get("version"), most=MOST_VERSION)
        self._version = max(self._version, int(version or 0), int(self.last.get("version", 0)))
        worker = row.get("worker")
        if isinstance(worker, str):
            self._attend(kind, short(worker, most=MOST_NAME), row)
        if kind == "finished":
            for attendant in self.crew.values():
                attendant.is_here = False
        if kind not in QUIET_EVENTS:
            details = {
                short(key, most=MOST_NAME): _detail(value)
                for key, value in list(row.items())[:MOST_FIGURES]
                if key not in ("time", "event", "version", "units")
            }
            at = number_of(row.get("time"), most=MOST_TIME)
            event = {"time": at, "event": kind, "version": self._version, "details": details}
            self.events.append({"number": self._next(), **event})

    def _attend(self, kind: str, worker: str, row: Mapping[str, Any]) -> None:
        if worker not in self.crew and len(self.crew) >= MOST_NODES:
            return
        match kind:
            case "joined":
                attendant = self.crew.setdefault(worker, Attendant())
                attendant.is_here = True
                attendant.joined += 1
            case "left" | "evicted":
                attendant = self.crew.setdefault(worker, Attendant())
                attendant.is_here = False
                attendant.lost += 1
                attendant.reason = short(row.get("reason"))

    def _take_nodes(self, now: float) -> None:
        if now - self._looked_for_nodes > NODES_SECONDS:
            self._looked_for_nodes = now
            for path in node_files(self.run.nodes)[:MOST_NODES]:
                node = node_of(path)
                self.nodes.setdefault(node.name, node)
        for node in self.nodes.values():
            node.refresh(_Numbers(self))


class _Numbers(Iterator[int]):
    """Of a run's events, samples and lines, in the order in which they were read."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched

    def __next__(self) -> int:
        return self._watched._next()


def _points(node: WatchedNode, since: int) -> list[list[float | None]]:
    return [point for number, point in node.points if number > since]


def _is_figure(key: str, value: object) -> bool:
    return _is_number(value) and FIGURE.fullmatch(key) is not None


def _is_number(value: object) -> bool:
    return type(value) in (float, int) and -MOST_VALUE < value < MOST_VALUE  # type: ignore[operator]


def _detail(value: object) -> str | int | float:
    """Of an event, as text where it is no number."""
    if isinstance(value, int | float) and _is_figure("value", value):
        return value
    with contextlib.suppress(RecursionError):
        return short(value if isinstance(value, str) else json.dumps(value), most=MOST_DETAIL)
    return ""


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
