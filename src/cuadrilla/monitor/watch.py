"""A run directory, followed: what the dashboard and Prometheus show of a run that trains, has ended or was broken off.

It reads files only, each from where it stopped the last time (`follow.py`), and keeps a bounded picture: curves in
`Series`, the newest events, samples and log lines, one row for each machine. A reader asks for `news` since its place.
"""

import contextlib
import json
import re
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cuadrilla.host.gpus import bounded
from cuadrilla.monitor.attendance import NEWEST, Attendance, Attendant, mean_shares
from cuadrilla.monitor.crew import state_of
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.nodes import MOST_NAME, MOST_TEXT, MOST_TIME, NodeLine, NodeNow, NodesReader
from cuadrilla.monitor.series import Series, SeriesPlace
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir

MOST_VERSION = 2**53
MOST_VALUE = 1e300
POINTS, SHARE_POINTS = 1200, 300
"""Of a curve, and of each machine's shares: a page is not wider."""
MOST_FIGURES, MOST_NODES = 40, 256
MOST_EVENTS, MOST_SAMPLES, MOST_LOG = 500, 100, 1000
MOST_SAMPLE = 8000
POINTS_OF = ("cpu_percent", "gpu_percent", "waiting_percent")
"""Of a machine's history, what the page draws."""
MOST_DETAIL = 400
REFRESH_SECONDS = 0.5
FIGURE = re.compile(r"[a-z0-9_]{1,64}")
QUIET_EVENTS = ("checkpoint",)
RUNNING = "running"
P = TypeVar("P")


class Watched(Protocol[P]):
    """What grows, and is told piece by piece. Its methods may be called from any thread."""

    @property
    def is_behind(self) -> bool:
        """More was in the files than one refresh takes in."""

    def refresh(self) -> None: ...

    def news(self, place: P) -> tuple[dict[str, Any], P]:
        """By name, what a reader at this place lacks; and where it is then."""


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
    nodes: dict[str, NodeNow] = field(default_factory=dict)
    crew: Attendance = field(default_factory=lambda: Attendance(most=MOST_NODES))
    counts: dict[str, int] = field(default_factory=dict)
    """Events by name."""
    updated: float = 0.0
    is_behind: bool = True
    """More was in the files than one refresh takes in."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._life = 0
        self._version = 0  # of the events
        self._newest: deque[dict[str, float]] = deque(maxlen=NEWEST)
        self._metrics, self._events = FileFollower(self.run.metrics), FileFollower(self.run.events)
        self._nodes = NodesReader(self.run, numbers=_Numbers(self), most=MOST_NODES)
        self._refreshed = float("-inf")

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
            self.nodes = {node.name: node for node in self._nodes.read()}
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
            log = [{"node": name, **asdict(line)} for name, line in self._log(since)]
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

    def _log(self, since: int) -> list[tuple[str, NodeLine]]:
        """The newest lines of all machines, with their names, in the order in which they came."""
        lines = [(name, line) for name, node in self.nodes.items() for line in node.lines if line.number > since]
        return sorted(lines, key=lambda named: (named[1].time, named[1].number))[-MOST_LOG:]

    def _head(self) -> dict[str, Any]:
        head = {"name": self.name, "state": self.state, "updated": self.updated, "behind": self.is_behind}
        return {**self.last, **head, "reason": "" if self.is_running else self.crew.reason}

    def rows(self) -> list[dict[str, Any]]:
        """One for each machine: those who are here first. The coordinator's own has a row, too, and no work."""
        names = {*self.crew.by_name, *self.nodes}
        shares = self._mean_shares()
        speed = self.last.get("tokens_per_second", 0.0)
        rows = [self._row(name, shares.get(name, 0.0), speed) for name in names]
        return sorted(rows, key=lambda row: (not row["here"], row["name"]))

    def _row(self, name: str, share: float, speed: float) -> dict[str, Any]:
        crew = self.crew.by_name
        attendant = crew.get(name, Attendant(is_here=self.is_running))
        here = attendant.is_here and self.is_running
        row: dict[str, Any] = {"name": name, "here": here, "works": name in crew or not crew}
        row |= {"share": round(share, 4)}
        row |= {"tokens_per_second": round(share * speed, 1) if here else 0.0}
        row |= {"joined": attendant.joined, "lost": attendant.lost, "reason": attendant.reason}
        return row | node_row(self.nodes.get(name), here=here)

    def _mean_shares(self) -> dict[str, float]:
        """A step of one worker names nobody."""
        if alone := self._alone():
            return {alone: 1.0} if self.last else {}
        return mean_shares(self._newest)

    def _alone(self) -> str:
        """Who does everything, if there is one."""
        here = self.crew.here if self.crew.by_name else self.nodes
        return next(iter(here)) if len(here) == 1 else ""

    def _next(self) -> int:
        self._number += 1
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
            self.crew.clear()
            self.counts, self._version = {}, 0
        for row in news.rows:
            self._take_event(row)

    def _take_event(self, row: Mapping[str, Any]) -> None:
        kind = short(row.get("event"), most=MOST_NAME)
        if kind in self.counts or len(self.counts) < MOST_FIGURES:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        self.crew.take(row)
        version = bounded(row.get("version"), most=MOST_VERSION)
        self._version = max(self._version, int(version or 0), int(self.last.get("version", 0)))
        if kind not in QUIET_EVENTS:
            details = {
                short(key, most=MOST_NAME): _detail(value)
                for key, value in list(row.items())[:MOST_FIGURES]
                if key not in ("time", "event", "version", "units")
            }
            at = bounded(row.get("time"), most=MOST_TIME)
            event = {"time": at, "event": kind, "version": self._version, "details": details}
            self.events.append({"number": self._next(), **event})


class _Numbers(Iterator[int]):
    """Of a run's events, samples, usage rows and lines, in the order in which they were read."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched

    def __next__(self) -> int:
        return self._watched._next()


def node_row(node: NodeNow | None, *, here: bool) -> dict[str, Any]:
    """What a machine has said, as a part of its row."""
    if node is None:
        return {}
    row: dict[str, Any] = {"seen": node.heard or 0.0, "phase": (node.phase or "") if here else ""}
    row |= {"usage": node.usage_and_link, "facts": node.facts}
    if node.lines:
        line = node.lines[-1]
        row |= {"word": line.text, "word_level": line.level, "word_dropped": line.dropped}
    return row


def _points(node: NodeNow, since: int) -> list[list[float | None]]:
    """Of its newest rows: when, and how busy its processor and its GPU were and how long it waited, as parts."""
    first = bisect_right(node.numbers, since)
    curves = [node.history[name][first:] for name in POINTS_OF] if node.numbers else []
    return [[at, *map(_part, values)] for at, *values in zip(node.times[first:], *curves, strict=True)]


def _part(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 3)


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
