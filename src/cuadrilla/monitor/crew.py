"""A run as its directory tells of it now: how far it is, and each of its machines, those who are there first.

Nothing is asked of the run's processes: a run that has ended, or was copied here, is read in the same way. Who came
and went is in its events, what each one does of the steps in its rows, the rest in `nodes/` (`monitor/nodes.py`).
A second read costs what the files have grown by.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.host.gpus import bounded
from cuadrilla.host.usage import whole_usage_data
from cuadrilla.link.names import COORDINATOR
from cuadrilla.monitor.attendance import NEWEST, Attendance, Attendant, AtWork, at_work
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.nodes import MOST_NAME, NodeLine, NodeNow, NodesReader
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, finite_json, is_abandoned, is_held_elsewhere, read_regular, require_regular

METRICS_TAIL_BYTES = 2**18
"""Twenty rows of a hundred workers with their shares have a fifth of that."""
MOST_MEMBERS = 1000
MOST_VALUE = 1e300
MOST_STATE_BYTES = 2**20
MOST_FILES = 4 * MOST_MEMBERS
SILENT_SECONDS = 300.0
"""Every few seconds a machine that trains writes how it is: sixty times as long, and a clock may be a little wrong."""
RUNNING, WAITING, STOPPED = "running", "waiting", "stopped"
STATES = (RUNNING, WAITING, STOPPED, "complete", "failed")


@dataclass(frozen=True, kw_only=True)
class CrewMember:
    """A machine of a run."""

    name: str
    here: bool
    node: NodeNow
    share: float | None = None
    """Of the newest steps; for one that has gone, None."""
    tokens_per_second: float | None = None
    seen: float | None = None
    """When it was heard last, by the coordinator's clock."""
    word: NodeLine | None = None
    """The newest line of its log, or why it left."""
    job: str = ""
    """Of a queue or a search: what it trains alone."""


@dataclass(frozen=True, kw_only=True)
class CrewNow:
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
    seen: float | None = None
    members: tuple[CrewMember, ...] = ()


@dataclass
class CrewReader:
    """Reads a run again and again."""

    run: RunDir
    _attendance: Attendance = field(default_factory=lambda: Attendance(most=MOST_MEMBERS))
    _rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The newest steps."""
    _bits: float | None = None

    def __post_init__(self) -> None:
        self._nodes = NodesReader(self.run)
        self._events = FileFollower(self.run.events)
        self._metrics = FileFollower(self.run.metrics, tail_bytes=METRICS_TAIL_BYTES)

    def read(self, *, now: float) -> CrewNow:
        """The run at `now`, in unix seconds. Never raises because of what its files hold."""
        self._read_events()
        self._read_metrics()
        state = state_of(self.run) if self.run.path.is_dir() else STOPPED
        nodes = {node.name: node for node in self._nodes.read()}
        rows = list(self._rows.values())
        came = self._attendance.by_name
        here = self._attendance.here if state == RUNNING else set[str]()
        at = at_work(here or set(came), rows)
        names = sorted({*came, *nodes}, key=lambda name: (name != COORDINATOR, name))[:MOST_MEMBERS]
        members = [_member(name, nodes.get(name), came.get(name), at.get(name), state=state) for name in names]
        newest = rows[-1] if rows else {}
        return CrewNow(
            name=one_line(self.run.path.resolve().name, most=MOST_NAME),
            state=state,
            time=now,
            reason="" if state == RUNNING else self._attendance.reason,
            version=_whole(newest.get("version")),
            tokens=_whole(newest.get("tokens")),
            loss=bounded(newest.get("loss"), least=-MOST_VALUE, most=MOST_VALUE),
            bits_per_byte=self._bits,
            tokens_per_second=_mean(row.get("tokens_per_second") for row in rows),
            seen=max((member.seen for member in members if member.seen is not None), default=None),
            members=tuple(sorted(members, key=lambda member: not member.here)),
        )

    def _read_events(self) -> None:
        for row in self._news(self._events, forget=self._attendance.clear):
            self._attendance.take(row)

    def _read_metrics(self) -> None:
        for row in self._news(self._metrics, forget=self._rows.clear):
            version = _whole(row.get("version"))
            if version is None:
                continue
            self._bits = bounded(row.get("val_bits_per_byte"), most=MOST_VALUE) or self._bits
            if "val_loss" in row and version not in self._rows and version < max(self._rows, default=0):
                continue  # what was found of a step long ago
            self._rows[version] = _figures(row)
            while len(self._rows) > NEWEST:
                self._rows.pop(next(iter(self._rows)))

    def _news(self, follower: FileFollower, *, forget: Callable[[], None]) -> Iterable[Mapping[str, Any]]:
        more = True
        while more:
            news = follower.read()
            if news.anew:
                forget()
            yield from news.rows
            more = news.more


def open_run(run: RunDir) -> CrewReader:
    """Raises ConfigError where no run is."""
    if not any(file.exists() for file in (run.run_file, run.metrics, run.events)):
        raise ConfigError("{path} is no run", path=run.path, hint="name a run folder, or its run.toml")
    return CrewReader(run)


def crew_data(crew: CrewNow) -> dict[str, Any]:
    """As plain data, without the histories: what `cuadrilla monitor RUN --json` prints (docs/monitor.md)."""
    head = {key: getattr(crew, key) for key in CrewNow.__dataclass_fields__ if key != "members"}
    return {**head, "machines": [_member_data(member, crew.time) for member in crew.members]}


def _member_data(member: CrewMember, now: float) -> dict[str, Any]:
    node, word = member.node, member.word
    return {
        "name": member.name,
        "here": member.here,
        "phase": node.phase if member.here else None,
        "share": member.share,
        "tokens_per_second": member.tokens_per_second,
        "waiting_part": node.waiting_part,
        "sent_bytes_per_second": node.sent_bytes_per_second,
        "received_bytes_per_second": node.received_bytes_per_second,
        "round_trip_seconds": node.round_trip_seconds,
        "seen": member.seen,
        "lag_seconds": None if member.seen is None else max(0.0, round(now - member.seen, 1)),
        "usage": whole_usage_data(node.usage),
        "facts": dict(node.facts),
        "word": None if word is None else {"time": word.time, "level": word.level, "text": word.text},
        "cut_lines": node.cut_lines,
    }


def state_of(run: RunDir) -> str:
    """What `status.json` says; whose process is gone, that one has stopped, whatever it says.

    A process of another host, or of a container, cannot be looked for: it is believed while its run says something.
    """
    try:
        require_regular(run.lock, most_bytes=MOST_STATE_BYTES)
        if not is_abandoned(run.lock) and not (is_held_elsewhere(run.lock) and _is_silent(run)):
            return RUNNING
    except (OSError, RecursionError, OverflowError):  # there is no lock, or none that anybody of ours has made
        pass
    try:
        status = finite_json(read_regular(run.status, most_bytes=MOST_STATE_BYTES))
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
        for file in itertools.islice(files, MOST_FILES):
            with contextlib.suppress(OSError):  # it has just been put away
                written.append(file.stat(follow_symlinks=False).st_mtime)
    return bool(written) and time.time() - max(written) > SILENT_SECONDS


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a step, what we show, if it can be."""
    told = row.get("shares")
    named = told.items() if isinstance(told, dict) else ()
    shares = [(one_line(name, most=MOST_NAME), bounded(part, most=1.0)) for name, part in named]
    figures: dict[str, Any] = {key: row.get(key) for key in ("version", "tokens", "loss")}
    figures["tokens_per_second"] = bounded(row.get("tokens_per_second"), most=MOST_VALUE)
    if shares:
        figures["shares"] = {name: part for name, part in shares if part is not None}
    return figures


def _member(name: str, node: NodeNow | None, came: Attendant | None, at: AtWork | None, *, state: str) -> CrewMember:
    here = state == RUNNING and (came is None or came.is_here)
    node = node or NodeNow(name=name)
    gone = came is not None and not came.is_here
    times = (node.heard, came.time if came is not None and not here else None)
    works = at is not None and (here or (state != RUNNING and at.share > 0))
    return CrewMember(
        name=name,
        here=here,
        node=node,
        share=at.share if at is not None and works else None,
        tokens_per_second=at.tokens_per_second if at is not None and works else None,
        seen=max((time for time in times if time is not None), default=None),
        word=_word(node.log, left=came.time if came is not None and gone else None, reason=came.reason if came else ""),
    )


def _word(log: Sequence[NodeLine], *, left: float | None, reason: str) -> NodeLine | None:
    newest = log[-1] if log else None
    if left is None or not reason or (newest is not None and newest.time > left):
        return newest
    return NodeLine(time=left, level="warning", text=reason)


def _whole(value: object) -> int | None:
    found = bounded(value, most=2.0**60)
    return None if found is None else int(found)


def _mean(values: Iterable[object]) -> float | None:
    known = [value for value in values if isinstance(value, float)]
    return sum(known) / len(known) if known else None
