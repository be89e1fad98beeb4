"""A run as its directory tells of it now: the one reader of runs, for all that shows them.

It reads files only, each from where it stopped the last time (`follow.py`), and asks no process: a run that has ended,
or was copied here, is read in the same way. It keeps a bounded picture: curves in `Series`, the newest events, samples
and log lines, and a `Machine` for each that has joined or told of itself (`nodes.py`). `read` gives the run as it is
now; `news` gives what a page that was told the rest lacks.
"""

import contextlib
import itertools
import json
import math
import os
import re
import socket
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.host.gpus import bounded
from cuadrilla.host.usage import whole_usage_data
from cuadrilla.link.base import COORDINATOR
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.nodes import (
    LINK_FIGURES,
    MAX_NAME,
    MAX_NODES,
    MAX_TEXT,
    MAX_TIME,
    NodeLine,
    NodeNow,
    NodesReader,
)
from cuadrilla.monitor.series import Series, SeriesPlace
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, finite_json, is_abandoned, lock_owner, read_regular

RUNNING, WAITING, STOPPED = "running", "waiting", "stopped"
STATES = (RUNNING, WAITING, STOPPED, "complete", "failed")
NEWEST = 20
"""Steps of which shares and speeds are means: one alone deals out so few units that its shares say little."""
TAIL_BYTES = 2**18
"""Of `metrics.jsonl`, for who wants no curves: twenty rows of a hundred workers have a fifth of that."""
MAX_VERSION, MAX_VALUE = 2**53, 1e300
POINTS, SHARE_POINTS = 1200, 300
"""Of a curve, and of each machine's shares: a page is not wider."""
MAX_FIGURES, MAX_EVENTS, MAX_SAMPLES, MAX_LOG = 40, 500, 100, 1000
MAX_SAMPLE, MAX_DETAIL = 8000, 400
MAX_STATE_BYTES = 2**20
POINTS_OF = ("cpu_percent", "gpu_percent", "waiting_percent")
"""Of a machine's history, what the page draws."""
REFRESH_SECONDS = 0.5
SILENT_SECONDS = 300.0
"""Every few seconds a machine that trains writes how it is: sixty times as long, and a clock may be a little wrong."""
FIGURE = re.compile(r"[a-z0-9_]{1,64}")
QUIET_EVENTS = ("checkpoint",)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine of a run. `works`: it computes steps, which the coordinator does not."""

    name: str
    here: bool
    node: NodeNow
    works: bool = True
    share: float | None = None
    """Of the newest steps; None for one that has gone."""
    tokens_per_second: float | None = None
    joined: int = 0
    lost: int = 0
    reason: str = ""
    """Why it left last."""
    seen: float | None = None
    """When it was heard last, by the coordinator's clock."""
    word: NodeLine | None = None
    """The newest line of its log, or why it left."""
    job: str = ""
    """Of a queue or a search: what it trains alone."""
    paused: bool = False
    """It is to wait: `cuadrilla pause`."""


@dataclass(frozen=True, kw_only=True)
class RunNow:
    """A run at `time`. `seen`: when anything of it was heard last. `reason`: why it has failed, or stopped."""

    name: str
    state: str
    time: float
    reason: str = ""
    version: int | None = None
    tokens: int | None = None
    loss: float | None = None
    bits_per_byte: float | None = None
    """Of the held-out text, as last measured."""
    tokens_per_second: float | None = None
    """Mean of the newest steps."""
    seen: float | None = None
    machines: tuple[Machine, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """How much a page has been told. `number`: of the newest event, sample, log line and point."""

    figures: SeriesPlace = field(default_factory=SeriesPlace)
    shares: SeriesPlace = field(default_factory=SeriesPlace)
    number: int = 0
    head: str = ""
    crew: str = ""
    life: int = 0


@dataclass(kw_only=True)
class Attendance:
    """What the events tell of a machine. `reason`: why it left last. `time`: when it came or went, or the run ended."""

    is_here: bool = False
    joined: int = 0
    lost: int = 0
    reason: str = ""
    time: float | None = None


@dataclass
class RunReader:
    """`refresh`, `read` and `news` may be called from any thread. `tail_bytes`: of the rows of a run, read the end."""

    run: RunDir
    tail_bytes: int | None = None
    state: str = "unknown"
    last: dict[str, float] = field(default_factory=dict)
    """The newest of each figure of `metrics.jsonl`."""
    figures: Series = field(default_factory=lambda: Series(POINTS, MAX_FIGURES))
    shares: Series = field(default_factory=lambda: Series(SHARE_POINTS, MAX_NODES, fills=True))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    counts: dict[str, int] = field(default_factory=dict)
    """Events by name."""
    reason: str = ""
    """Why the run has failed or stopped, if nobody has joined since."""
    updated: float = 0.0
    is_behind: bool = True
    """More was in the files than one refresh takes in."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._number = 0
        self._life = 0
        self._version = 0  # of the events
        self._best: dict[str, float] = {}
        self._attendance: dict[str, Attendance] = {}
        self._newest: dict[int, Mapping[str, Any]] = {}
        self._nodes: dict[str, NodeNow] = {}
        self._metrics = FileFollower(self.run.metrics, tail_bytes=self.tail_bytes)
        self._events = FileFollower(self.run.events)
        self._nodes_reader = NodesReader(self.run, numbers=iter(self._next, None))
        self._refreshed = float("-inf")

    @property
    def name(self) -> str:
        return one_line(self.run.path.resolve().name, most=MAX_NAME)

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    def refresh(self) -> None:
        """Take in what the run has written since; not more often than twice a second."""
        with self._lock:
            if time.monotonic() - self._refreshed >= REFRESH_SECONDS or self.is_behind:
                self._take()

    def read(self, *, now: float) -> RunNow:
        """The run at `now`, in unix seconds. Never raises because of what its files hold."""
        with self._lock:
            self._take()
            while self.is_behind:
                self._take()
            machines = tuple(self.machines())
            return RunNow(
                name=self.name,
                state=self.state,
                time=now,
                reason="" if self.is_running else self.reason,
                version=_whole(self.last.get("version")),
                tokens=_whole(self.last.get("tokens")),
                loss=self.last.get("loss"),
                bits_per_byte=self.last.get("val_bits_per_byte"),
                tokens_per_second=self._mean_speed(),
                seen=max((machine.seen for machine in machines if machine.seen is not None), default=None),
                machines=machines,
            )

    def news(self, place: RunPlace) -> tuple[dict[str, Any], RunPlace]:
        """By name, what a page at this place lacks; and where it is then."""
        with self._lock:
            if place.life != self._life:
                place = RunPlace(life=self._life)
            found: dict[str, Any] = {"anew": True} if place == RunPlace(life=self._life) else {}
            figures, at_figures = self.figures.since(place.figures)
            shares, at_shares = self.shares.since(place.shares)
            since = place.number
            head, crew = self._head(), [machine_data(machine) for machine in self.machines()]
            told = (json.dumps(head), json.dumps(crew))
            parts = {
                "head": head if told[0] != place.head else None,
                "crew": crew if told[1] != place.crew else None,
                "figures": figures,
                "shares": shares,
                "points": {name: new for name, node in self._nodes.items() if (new := _points(node, since))},
                "events": [event for event in self.events if event["number"] > since],
                "samples": [sample for sample in self.samples if sample["number"] > since],
                "log": [{"node": name, **asdict(line)} for name, line in self._log(since)],
            }
            found |= {name: part for name, part in parts.items() if part}
            here = RunPlace(
                figures=at_figures, shares=at_shares, number=self._number, head=told[0], crew=told[1], life=self._life
            )
            return found, here

    def machines(self) -> list[Machine]:
        """Those that are here first."""
        names = sorted({*self._attendance, *self._nodes}, key=lambda name: (name != COORDINATOR, name))[:MAX_NODES]
        shares, speed = self._mean_shares(), self._mean_speed() or 0.0
        found = [self._machine(name, shares.get(name, 0.0), speed) for name in names]
        return sorted(found, key=lambda machine: not machine.here)

    def _machine(self, name: str, share: float, speed: float) -> Machine:
        came, node = self._attendance.get(name), self._nodes.get(name) or NodeNow(name=name)
        here = self.is_running and (came is None or came.is_here)
        works = came is not None or (not self._attendance and name != COORDINATOR)
        shares = works and (here or (not self.is_running and share > 0))
        came = came or Attendance()
        times = (node.heard, None if here else came.time)
        return Machine(
            name=name,
            here=here,
            node=node,
            works=works,
            share=share if shares else None,
            tokens_per_second=share * speed if shares else None,
            joined=came.joined,
            lost=came.lost,
            reason=came.reason,
            seen=max((each for each in times if each is not None), default=None),
            word=_word(node.log, came),
        )

    def _log(self, since: int) -> list[tuple[str, NodeLine]]:
        """The newest lines of all machines, with their names, in the order in which they came."""
        lines = [(name, line) for name, node in self._nodes.items() for line in node.lines if line.number > since]
        return sorted(lines, key=lambda named: (named[1].time, named[1].number))[-MAX_LOG:]

    def _head(self) -> dict[str, Any]:
        head = {"name": self.name, "state": self.state, "updated": self.updated, "behind": self.is_behind}
        return {**self.last, **self._best, **head, "reason": "" if self.is_running else self.reason}

    def _mean_shares(self) -> dict[str, float]:
        """Of the newest steps; a step of one worker names nobody."""
        if alone := self._alone():
            return {alone: 1.0} if self._newest else {}
        told = [row["shares"] for row in self._newest.values() if "shares" in row]
        return {name: sum(shares.get(name, 0.0) for shares in told) / len(told) for name in set().union(*told)}

    def _mean_speed(self) -> float | None:
        speeds = [row["tokens_per_second"] for row in self._newest.values() if "tokens_per_second" in row]
        return sum(speeds) / len(speeds) if speeds else None

    def _alone(self) -> str:
        """Who does everything, if there is one."""
        here = [name for name, came in self._attendance.items() if came.is_here]
        names = here or list(self._attendance) or [name for name in self._nodes if name != COORDINATOR]
        return names[0] if len(names) == 1 else ""

    def _next(self) -> int:
        """The number of the next event, sample, usage row or line, in the order in which they are read."""
        self._number = next(self._numbers)
        return self._number

    def take_rows(self) -> None:
        """Only what `last` and the curves hold."""
        with self._lock:
            self._take_metrics()
            while self.is_behind:
                self._take_metrics()

    # What was read

    def _take(self) -> None:
        self._take_events()
        self._take_metrics()
        self._nodes = {node.name: node for node in self._nodes_reader.read()}
        self.state = state_of(self.run) if self.run.path.is_dir() else STOPPED
        self._refreshed = time.monotonic()

    def _take_metrics(self) -> None:
        news = self._metrics.read()
        self.is_behind = news.more
        if news.anew:
            self._life += 1
            self.last, self._best = {}, {}
            self.figures.clear()
            self.shares.clear()
            self.samples.clear()
            self._newest.clear()
        for row in news.rows:
            version = row.get("version")
            if isinstance(version, int) and not isinstance(version, bool) and 0 <= version < MAX_VERSION:
                self._take_row(version, row)
        if news.rows:
            self.updated = _modified(self.run.metrics)

    def _take_row(self, version: int, row: Mapping[str, Any]) -> None:
        figures = {key: value for key, value in row.items() if _is_figure(key, value)}
        is_late = "val_loss" in row and version < self.last.get("version", 0)  # what was found of a step long ago
        told = {key: value for key, value in figures.items() if key.startswith("val_")} if is_late else figures
        self.last |= {key: value for key, value in told.items() if key in self.last or len(self.last) < MAX_FIGURES}
        figures.pop("version", None)
        if "val_loss" in figures and figures["val_loss"] < self._best.get("best_loss", math.inf):
            self._best = {"best_loss": figures["val_loss"], "best_version": version}
        self.figures.add(version, figures)
        shares = self._take_shares(version, row)
        if not is_late or version in self._newest:
            speed = {name: figures[name] for name in ("tokens_per_second",) if name in figures}
            self._newest[version] = speed | ({"shares": shares} if shares else {})
            while len(self._newest) > NEWEST:
                self._newest.pop(next(iter(self._newest)))
        sample = row.get("sample")
        if isinstance(sample, str):
            self.samples.append({"number": self._next(), "version": version, "text": sample[:MAX_SAMPLE]})

    def _take_shares(self, version: int, row: Mapping[str, Any]) -> dict[str, float]:
        told = row.get("shares")
        if isinstance(told, dict):
            shares = {short_name(name): part for name, part in told.items() if _is_number(part) and 0 <= part <= 1}
            self.shares.add(version, shares)
            return shares
        if len(self.shares) and row.get("workers") == 1:
            if alone := self._alone():
                self.shares.add(version, {alone: 1.0})
            else:  # nobody is named: one of several did it all
                self.shares.skip(version)
        return {}

    def _take_events(self) -> None:
        news = self._events.read()
        if news.anew:
            self._life += 1
            self.events.clear()
            self._attendance.clear()
            self.counts, self._version, self.reason = {}, 0, ""
        for row in news.rows:
            self._take_event(row)

    def _take_event(self, row: Mapping[str, Any]) -> None:
        kind = short(row.get("event"), most=MAX_NAME)
        if kind in self.counts or len(self.counts) < MAX_FIGURES:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        at = bounded(row.get("time"), least=1.0, most=MAX_TIME)
        self._attend(kind, row, at)
        version = bounded(row.get("version"), most=MAX_VERSION)
        self._version = max(self._version, int(version or 0), int(self.last.get("version", 0)))
        if kind not in QUIET_EVENTS:
            details = {
                short(key, most=MAX_NAME): _detail(value)
                for key, value in list(row.items())[:MAX_FIGURES]
                if key not in ("time", "event", "version", "units")
            }
            event = {"time": at, "event": kind, "version": self._version, "details": details}
            self.events.append({"number": self._next(), **event})

    def _attend(self, kind: str, row: Mapping[str, Any], at: float | None) -> None:
        """Who came and went; nobody is in a run that has finished or failed."""
        reason = row.get("reason")
        reason = one_line(reason, most=MAX_TEXT) if isinstance(reason, str) else ""
        if kind in ("finished", "failed"):
            for came in self._attendance.values():
                came.time = at if came.is_here else came.time
                came.is_here = False
            self.reason = "" if row.get("complete") else reason
        worker = row.get("worker")
        name = short_name(worker) if isinstance(worker, str) else None
        if name is None or kind not in ("joined", "left", "evicted"):
            return
        if name not in self._attendance and len(self._attendance) >= MAX_NODES:
            return
        came = self._attendance.setdefault(name, Attendance())
        came.is_here, came.time = kind == "joined", at
        if came.is_here:
            came.joined += 1
            self.reason = ""
        else:
            came.lost += 1
            came.reason = reason


def open_run(run: RunDir) -> RunReader:
    """For the run as it is now, without its curves. Raises ConfigError where no run is."""
    if not any(file.exists() for file in (run.run_file, run.metrics, run.events)):
        raise ConfigError("{path} is no run", path=run.path, hint="name a run folder, or its run.toml")
    return RunReader(run, tail_bytes=TAIL_BYTES)


def run_data(run: RunNow) -> dict[str, Any]:
    """As plain data: what `cuadrilla monitor RUN --json` prints (docs/monitor.md)."""
    head = {key: getattr(run, key) for key in RunNow.__dataclass_fields__ if key != "machines"}
    return {**head, "machines": [{**machine_data(each), "lag_seconds": lag(each, run)} for each in run.machines]}


def machine_data(machine: Machine) -> dict[str, Any]:
    """As plain data, without the histories."""
    node, word = machine.node, machine.word
    return {
        **{key: getattr(machine, key) for key in ("name", "here", "works", "share", "tokens_per_second")},
        **{key: getattr(machine, key) for key in ("joined", "lost", "reason", "seen")},
        "phase": "paused" if machine.paused else node.phase if machine.here else None,
        **{key: getattr(node, key) for key in LINK_FIGURES},
        "usage": whole_usage_data(node.usage),
        "facts": dict(node.facts),
        "word": None if word is None else {"time": word.time, "level": word.level, "text": word.text},
        "cut_lines": node.cut_lines,
    }


def lag(machine: Machine, run: RunNow) -> float | None:
    """Seconds since it was heard. Clocks of two machines may differ: nothing is newer than now."""
    return None if machine.seen is None else max(0.0, round(run.time - machine.seen, 1))


def state_of(run: RunDir) -> str:
    """What `status.json` says; whose process is gone, that one has stopped, whatever it says.

    The lock of another host, or of a container, may not be seen from here: it is believed while its run says something.
    """
    with contextlib.suppress(OSError):  # there is no lock, or none that anybody of ours has made
        is_elsewhere = lock_owner(run.lock).get("host") not in (None, socket.gethostname())
        if not is_abandoned(run.lock) or (is_elsewhere and not _is_silent(run)):
            return RUNNING
    try:
        status = finite_json(read_regular(run.status, most_bytes=MAX_STATE_BYTES))
    except FileNotFoundError:
        return WAITING
    except (OSError, ValueError, RecursionError):
        return STOPPED
    state = status.get("state") if isinstance(status, dict) else None
    return state if isinstance(state, str) and state in STATES and state != RUNNING else STOPPED


def _is_silent(run: RunDir) -> bool:
    """Whether nothing has come from a run's machines for long; what has no such files says nothing by its nature."""
    written = []
    with os.scandir(run.nodes) if run.nodes.is_dir() else contextlib.nullcontext(()) as files:
        for file in itertools.islice(files, 4 * MAX_NODES):
            with contextlib.suppress(OSError):  # it has just been put away
                written.append(file.stat(follow_symlinks=False).st_mtime)
    return bool(written) and time.time() - max(written) > SILENT_SECONDS


def _word(log: Sequence[NodeLine], came: Attendance) -> NodeLine | None:
    """The newest line, or why it left, if that was later."""
    newest = log[-1] if log else None
    has_left = came.lost and not came.is_here and came.reason and came.time is not None
    if not has_left or came.time is None or (newest is not None and newest.time > came.time):
        return newest
    return NodeLine(time=came.time, level="warning", text=came.reason)


def _points(node: NodeNow, since: int) -> list[list[float | None]]:
    """Of its newest rows: when, and how busy its processor and its GPU were and how long it waited, as parts."""
    first = bisect_right(node.numbers, since)
    curves = [node.history[name][first:] for name in POINTS_OF] if node.numbers else []
    return [[at, *map(_part, values)] for at, *values in zip(node.times[first:], *curves, strict=True)]


def _part(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 3)


def short_name(name: str) -> str:
    """Names come again in every row."""
    return _short_name(name[:MAX_NAME])


@lru_cache(maxsize=4096)
def _short_name(name: str) -> str:
    return one_line(name, most=MAX_NAME)


def short(value: object, *, most: int = MAX_TEXT) -> str:
    """Text of one line."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return one_line(text[:most])


def _is_figure(key: str, value: object) -> bool:
    return _is_number(value) and FIGURE.fullmatch(key) is not None


def _is_number(value: object) -> bool:
    return type(value) in (float, int) and -MAX_VALUE < value < MAX_VALUE  # type: ignore[operator]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _detail(value: object) -> str | int | float:
    """Of an event, as text where it is no number."""
    if isinstance(value, int | float) and _is_number(value):
        return value
    with contextlib.suppress(RecursionError):
        return short(value if isinstance(value, str) else json.dumps(value), most=MAX_DETAIL)
    return ""


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
