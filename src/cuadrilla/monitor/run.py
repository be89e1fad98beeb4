"""The state of a run, read from its directory: for `cuadrilla monitor`, for the dashboard and for Prometheus.

It reads files only, each from where it stopped the last time (`follow.py`), and asks no process. So a run that has
ended, or was copied here, is read in the same way. The results are plain data: `data` is the whole state, which
`cuadrilla monitor` shows; `page` is what a page shows of it, in parts. Texts are escaped where they are shown.

A queue and a search have machines too, in a folder like that of a run: each machine does one job after the other.
"""

import contextlib
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.link.base import COORDINATOR, node_of
from cuadrilla.messages import SPANISH, recognised
from cuadrilla.monitor.follow import FileFollower, figures, parsed
from cuadrilla.monitor.series import Series
from cuadrilla.rundir import RunDir, is_held, node_file, read_object, worker_of_node_file
from cuadrilla.runfile import leaves

RUNNING, WAITING, STOPPED = "running", "waiting", "stopped"
NEWEST = 20
"""Newest steps over which shares and speeds are averaged: a single step has too few units to tell the shares."""
TAIL_BYTES = 2**18
"""Bytes to read at the end of `metrics.jsonl` if no curves are needed: 5 times twenty rows of a hundred workers."""
POINTS, SHARE_POINTS = 1200, 300
"""Maximum number of points of a curve, and of each machine's shares: a page is no wider."""
MAX_EVENTS, MAX_SAMPLES, MAX_LOG = 500, 100, 1000
NODE_TAIL_BYTES = 3 * 2**15
"""Bytes to read at the end of a machine's file: some 300 rows, a quarter of an hour or more."""
MAX_HISTORY, MAX_LOG_LINES, MAX_NOTES_BYTES = 120, 300, 2**16
LINK_FIGURES = ("waiting_part", "sent_bytes_per_second", "received_bytes_per_second", "round_trip_seconds")
"""Figures of its link that a worker adds to its usage."""
Line = dict[str, Any]
"""A line of a log: `time`, `level`, `text`, `dropped` (how many lines were left out here)."""


@dataclass
class Participant:
    """A machine, from the run's events and from its own file in `nodes`, if it has one. The coordinator has checked the
    rows of that file; the first one has the machine's facts. The first read takes the end of the file, each later one
    the rows added since.
    """

    name: str
    path: Path
    here: bool | None = None
    """Whether it takes part; None if no event names it."""
    since: float | None = None
    """When it came, left, or the run ended."""
    joined: int = 0
    lost: int = 0
    reason: str = ""
    """Why it left last."""
    job: str = ""
    """The one that it does, for a queue or a search."""
    heard: float | None = None
    """When its newest row of any kind was written, by the coordinator's clock."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """The newest usage row, with `phase` and the `LINK_FIGURES`."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """From its newest session: device, processor, system, torch, cuadrilla."""
    points: deque[list[float | None]] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    """[time, processor busy, GPU busy, worker waiting]. The last three are parts from 0 to 1."""
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=MAX_LOG_LINES))

    def __post_init__(self) -> None:
        self._follower = FileFollower(self.path, tail_bytes=NODE_TAIL_BYTES)

    def read(self) -> None:
        if self.heard is None:
            with contextlib.suppress(OSError), open(self.path, "rb") as file:
                for row in parsed(file.readline()):
                    self.facts = row.get("facts", {})
        for row in self._follower.rows():
            self._take(row)

    @property
    def word(self) -> dict[str, Any] | None:
        """The newest line of its log, or why it left, if that was later."""
        said = next((line for line in reversed(self.lines) if not line["dropped"]), None)
        if self.lost and not self.here and self.reason and (said is None or said["time"] <= (self.since or 0.0)):
            return {"time": self.since, "level": "warning", "text": self.reason}
        return None if said is None else {key: said[key] for key in ("time", "level", "text")}

    def _take(self, row: Mapping[str, Any]) -> None:
        self.heard = row["time"]
        match row.get("kind"):
            case "usage":
                self.usage = {key: value for key, value in row.items() if key not in ("time", "kind")}
                gpus = [gpu["busy_percent"] for gpu in row.get("gpus", ()) if "busy_percent" in gpu]
                busy = [_part(row.get("cpu_percent")), _part(max(gpus, default=None)), row.get("waiting_part")]
                self.points.append([row["time"], *busy])
            case "log":
                self.lines.append({key: row[key] for key in ("time", "level", "text")} | {"dropped": 0})
            case "cut":
                self.lines.append({"time": row["time"], "level": "warning", "text": "", "dropped": row["lines"]})
            case "hello":
                self.facts = row["facts"]


class RunReader:
    """Reads one run. Thread-safe. `tail_bytes`: read only this much of the end of `metrics.jsonl`."""

    def __init__(self, run: RunDir, *, tail_bytes: int | None = None) -> None:
        self.run = run
        self.state = "unknown"
        self._lock = threading.Lock()
        self._metrics = FileFollower(run.metrics, tail_bytes=tail_bytes)
        self._events = FileFollower(run.events)
        self._forget_rows()
        self._forget_events()

    def data(self, *, now: float, nodes: Collection[str] = ()) -> dict[str, Any]:
        """The run at `now`, in Unix seconds, with its machines: see docs/watch.md. `nodes`: names of machines to list
        even if they are absent."""
        with self._lock:
            self._take()
            machines = self._machines()
            known = {node_of(machine["name"]) for machine in machines}
            absent = [Participant(name, self.run.nodes / node_file(name)) for name in nodes if name not in known]
            machines += [{**self._machine(node, 0.0, 0.0), "here": False} for node in absent]
            seen = max((machine["seen"] for machine in machines if machine["seen"] is not None), default=None)
            return {**self._head(), "time": now, "seen": seen, "machines": machines}

    def page(self) -> dict[str, Any]:
        """All that a page shows, by part: plain data of bounded size, which later reads do not change."""
        with self._lock:
            self._take()
            return {
                "head": self._head(),
                "crew": self._machines(),
                "about": about(self.run),
                "figures": self._figures.data(),
                "shares": self._shares.data(),
                "points": {name: list(node.points) for name, node in self._nodes.items()},
                "events": list(self._happened),
                "samples": list(self._samples),
                "log": self._log(),
                "spanish": self._spanish(),
            }

    def _spanish(self) -> dict[str, str]:
        """What a page shows of reasons, events and logs, which are in English, in Spanish: by the English text."""
        lines = [*self._log(), *(word for node in self._nodes.values() if (word := node.word))]
        texts = {self._reason, *(line["text"] for line in lines), *(node.reason for node in self._nodes.values())}
        texts |= {value for event in self._happened for value in event["details"].values() if isinstance(value, str)}
        return {text: said for text in texts if (said := recognised(text, SPANISH)) != text}

    def _log(self) -> list[Line]:
        """The newest log lines of all machines, with their names, in the order of time."""
        lines = [{"node": node.name, **line} for node in self._nodes.values() for line in node.lines]
        return sorted(lines, key=lambda line: line["time"])[-MAX_LOG:]

    # How it stands

    def _head(self) -> dict[str, Any]:
        name, reason = self.run.path.resolve().name, "" if self.state == RUNNING else self._reason
        head = {"name": name, "state": self.state, "reason": reason}
        updated = {"updated": modified(self.run.metrics)}
        return {**self._last, **self._best, **head, **updated, **self._mean_speed(), **self._outlook()}

    def _outlook(self) -> dict[str, float | None]:
        """The run's number of steps, and the seconds that the remaining steps take at the pace of the newest ones."""
        num_steps, rows = read_object(self.run.config).get("num_steps"), self._newest.values()
        if num_steps is None or self.state != RUNNING or not rows:
            return {"num_steps": num_steps}
        pace = sum(row.get("seconds", 0.0) for row in rows) / sum(row.get("steps", 1) for row in rows)
        return {"num_steps": num_steps, "left_seconds": pace * (num_steps - self._last["version"])}

    def _mean_speed(self) -> dict[str, float]:
        speeds = [row["tokens_per_second"] for row in self._newest.values() if "tokens_per_second" in row]
        return {"tokens_per_second": sum(speeds) / len(speeds)} if speeds else {}

    def _mean_shares(self) -> dict[str, float]:
        """Each present machine's mean share of the newest steps, scaled so that the shares add up to 1."""
        gone = {name for name, node in self._nodes.items() if self.state == RUNNING and node.here is False}
        shared = [row["shares"] for row in self._newest.values() if "shares" in row]
        names = set[str]().union(*shared) - gone
        sums = {name: sum(shares.get(name, 0.0) for shares in shared) for name in names}
        return {name: value / (sum(sums.values()) or 1.0) for name, value in sums.items()}

    def _machines(self) -> list[dict[str, Any]]:
        """All machines, those present first."""
        shares, speed = self._mean_shares(), self._mean_speed().get("tokens_per_second", 0.0)
        nodes = sorted(self._nodes.values(), key=lambda node: (node.name != COORDINATOR, node.name))
        found = [self._machine(node, shares.get(node.name, 0.0), speed) for node in nodes]
        return sorted(found, key=lambda machine: not machine["here"])

    def _machine(self, node: Participant, share: float, speed: float) -> dict[str, Any]:
        here = self.state == RUNNING and node.here is not False
        are_named = any(each.here is not None for each in self._nodes.values())
        works = node.here is not None if are_named else node.name != COORDINATOR
        shares = bool(self._newest) and works and (here or (self.state != RUNNING and share > 0))
        usage = dict(node.usage)
        phase = usage.pop("phase", None)
        times = (node.heard, None if here else node.since)
        return {
            "name": node.name,
            "here": here,
            "works": works,
            "share": share if shares else None,
            "tokens_per_second": share * speed if shares else None,
            **{key: getattr(node, key) for key in ("joined", "lost", "reason")},
            "seen": max((each for each in times if each is not None), default=None),
            "phase": phase if here else None,
            **{key: usage.pop(key, None) for key in LINK_FIGURES},
            "usage": usage,
            "facts": node.facts,
            "word": node.word,
            "job": node.job if here else "",
        }

    # What was read

    def _take(self) -> None:
        self.state = state_of(self.run) if self.run.path.is_dir() else STOPPED
        for event in self._events.rows(anew=self._forget_events):
            self._take_event(event)
        for row in self._metrics.rows(anew=self._forget_rows):
            if "version" in row:
                self._take_row(row["version"], row)
        for path in self.run.nodes.glob("*.jsonl"):
            self._node(worker_of_node_file(path.name))
        for node in self._nodes.values():
            node.read()

    def _node(self, name: str) -> Participant:
        return self._nodes.setdefault(name, Participant(name, self.run.nodes / node_file(name)))

    def _forget_rows(self) -> None:
        self._figures, self._shares = Series(POINTS), Series(SHARE_POINTS, fills=True)
        self._last: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._elapsed = 0.0
        self._newest: dict[int, dict[str, Any]] = {}
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)

    def _take_row(self, version: int, row: dict[str, Any]) -> None:
        found = dict(figures(row))
        is_late = "val_loss" in found and version < self._last.get("version", 0)  # an evaluation of an earlier step
        self._last |= {key: value for key, value in found.items() if key.startswith("val_")} if is_late else found
        if found.get("val_loss", math.inf) < self._best.get("best_loss", math.inf):
            self._best = {"best_loss": found["val_loss"], "best_version": version}
        if not is_late or version in self._newest:
            keys = ("tokens_per_second", "shares", "seconds", "steps")
            self._newest[version] = {key: row[key] for key in keys if row.get(key)}
            while len(self._newest) > NEWEST:
                self._newest.pop(next(iter(self._newest)))
        del found["version"]
        if "seconds" in found:
            self._elapsed += found["seconds"]
            found["elapsed"] = self._elapsed
        self._figures.add(version, found)
        if shares := row.get("shares"):
            self._shares.add(version, shares)
        if sample := row.get("sample"):
            self._samples.append({"version": version, "text": sample})

    def _forget_events(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of events, by name."""
        self._reason, self._version = "", 0
        self._nodes: dict[str, Participant] = {}
        self._happened: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    def _take_event(self, row: Mapping[str, Any]) -> None:
        kind, at, worker, reason = row["event"], row.get("time"), row.get("worker"), row.get("reason", "")
        self.counts[kind] += 1
        self._version = max(self._version, row.get("version") or 0, int(self._last.get("version", 0)))
        if kind in ("finished", "failed"):  # nobody is in a run that has ended
            for node in self._nodes.values():
                if node.here:
                    node.here, node.since, node.reason = False, at, ""
            self._reason = "" if row.get("complete") else reason
        elif worker is not None and kind in ("joined", "left", "evicted"):
            node = self._node(worker)
            node.here, node.since, node.job = kind == "joined", at, ""
            if node.here:
                node.joined, self._reason = node.joined + 1, ""
            else:
                node.lost, node.reason = node.lost + 1, reason
        elif worker is not None and kind in ("assigned", "returned"):
            self._node(worker).job = row["job"] if kind == "assigned" else ""
        if kind != "checkpoint":
            details = {key: value for key, value in row.items() if key not in ("time", "event", "version", "units")}
            details |= {"count": len(row["units"])} if "units" in row else {}
            self._happened.append({"time": at, "event": kind, "version": self._version, "details": details})


def open_run(folder: Path, *, tail_bytes: int | None = None) -> RunReader:
    """The reader of a run. Raises ConfigError if the folder is none."""
    if not is_run(folder):
        raise ConfigError("{path} is no run", path=folder, hint="name a run folder, or its run.toml")
    return RunReader(RunDir(folder), tail_bytes=tail_bytes)


def is_run(folder: Path) -> bool:
    run = RunDir(folder)
    return any(path.is_file() for path in (run.metrics, run.status, run.events, run.run_file))


def state_of(run: RunDir) -> str:
    """The state in `status.json`. A run that should be running but is not locked by a process has stopped."""
    if is_held(run.lock):
        return RUNNING
    if not run.status.exists():
        return WAITING
    state = read_object(run.status).get("state", RUNNING)
    return STOPPED if state == RUNNING else str(state)


def modified(path: Path) -> float:
    """When a file was last written, in Unix seconds; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def _part(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 3)


def about(run: RunDir) -> dict[str, Any]:
    """What a page shows beside a run's curves: notes, settings, data, size of the model, software of the coordinator.

    `changed`: keys of `values` that were set by the run file or on the command line.
    """
    config = read_object(run.config)
    values = {key: value for key, value in leaves(config.get("values", {})).items() if not key.startswith("alarm.")}
    origins = config.get("origins", {})
    folder = values.get("data.folder")
    manifest = read_object(run.path / folder / "manifest.json") if folder else {}  # {} if it is on another machine
    notes = ""
    with contextlib.suppress(OSError), open(run.notes, encoding="utf-8", errors="replace") as file:
        notes = file.read(MAX_NOTES_BYTES)
    return {
        "notes": notes,
        "parameters": config.get("parameters"),
        "values": values,
        "changed": [key for key in values if origins.get(key, "default") != "default"],
        "environment": read_object(run.env),
        "data": {key: manifest[key] for key in ("vocab_size", "sources", "splits") if key in manifest},
    }
