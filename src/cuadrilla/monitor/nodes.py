"""What each machine of a run has last said about itself: the ends of the files `RUN/nodes/NAME.jsonl`.

The coordinator writes these files and rotates them (`NAME.jsonl.1` is the older half). A reader looks at the last
`TAIL_BYTES` of a machine's rows only, however long it has worked. What is in them came from other machines: numbers
have ranges, texts are one line of bounded length in which nothing acts on a terminal, torn lines are skipped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.host.gpus import bounded
from cuadrilla.host.usage import MOST_RATE, Usage, parse_usage
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, finite_json, require_regular, worker_of_node_file

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
PHASES = ("loading", "receiving", "computing", "sending", "waiting", "paused")
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
    """Reads a run's machines again and again; remembers the facts of those whose session began long ago."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.nodes
        self._facts: dict[str, Mapping[str, str]] = {}

    def read(self) -> list[NodeNow]:
        """By name. A run without such files has no machines to show."""
        return [self._node(path) for path in node_files(self._folder)]

    def _node(self, path: Path) -> NodeNow:
        name = worker_of_node_file(path.name)
        rows = tail_rows(path)
        if name not in self._facts:
            self._facts[name] = old_facts(path)
        node = node_from(name, rows, facts=self._facts[name])
        self._facts[name] = node.facts
        return node


def read_nodes(run: RunDir) -> list[NodeNow]:
    """Once. Never raises because of what the files hold."""
    return NodesReader(run).read()


def node_files(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    except OSError:
        return []
    return found[:MOST_NODES]


def tail_rows(path: Path, *, most_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last rows, oldest first: of the file, and of the older one while the file is short."""
    newer, whole = _tail(path, most_bytes)
    left = most_bytes - len(newer)
    older = _tail(path.with_name(path.name + ".1"), left)[0] if whole and left > 0 else b""
    return [row for part in (older, newer) for row in _rows(part)]


def _tail(path: Path, most_bytes: int) -> tuple[bytes, bool]:
    """The file's last bytes from the beginning of a line on, and whether that is all of it."""
    try:
        require_regular(path)
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            first = max(0, size - most_bytes)
            file.seek(first)
            raw = file.read(most_bytes)
    except OSError:
        return b"", True
    return (raw, True) if first == 0 else (raw.partition(b"\n")[2], False)


def _rows(raw: bytes) -> Iterable[dict[str, Any]]:
    for line in raw.split(b"\n"):
        try:
            row = finite_json(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def old_facts(path: Path) -> Mapping[str, str]:
    """Of the newest `hello`, wherever in the files it is."""
    for file in (path, path.with_name(path.name + ".1")):
        raw, _ = _tail(file, MOST_FILE_BYTES)
        end = len(raw)
        while (found := raw.rfind(HELLO, 0, end)) >= 0:
            first, last = raw.rfind(b"\n", 0, found) + 1, raw.find(b"\n", found)
            for row in _rows(raw[first : last if last >= 0 else len(raw)]):
                if row.get("kind") == "hello":
                    return parse_facts(row.get("facts"))
            end = first
    return {}


def node_from(name: str, rows: Sequence[Mapping[str, Any]], *, facts: Mapping[str, str] | None = None) -> NodeNow:
    """From a machine's rows, oldest first. `facts`: what is known of it if no row says so."""
    timed = [(at, row) for row in rows if (at := bounded(row.get("time"), least=1.0, most=MOST_TIME)) is not None]
    used = [(at, row, parse_usage(row)) for at, row in timed if row.get("kind") == "usage"][-MOST_HISTORY:]
    at, newest, usage = used[-1] if used else (None, {}, Usage())
    said = next((row for _, row in reversed(timed) if row.get("kind") == "hello"), None)
    phase = newest.get("phase")
    history = [figures(row, usage) for _, row, usage in used]
    return NodeNow(
        name=one_line(name, most=MOST_NAME),
        heard=max((at for at, _ in timed), default=None),
        time=at,
        usage=usage,
        phase=phase if isinstance(phase, str) and phase in PHASES else None,
        waiting_part=bounded(newest.get("waiting_part"), most=1.0),
        sent_bytes_per_second=bounded(newest.get("sent_bytes_per_second"), most=MOST_RATE),
        received_bytes_per_second=bounded(newest.get("received_bytes_per_second"), most=MOST_RATE),
        round_trip_seconds=bounded(newest.get("round_trip_seconds"), most=MOST_SECONDS),
        facts=parse_facts(said.get("facts")) if said is not None else facts or {},
        history={key: tuple(one[key] for one in history) for key in (history[0] if history else ())},
        times=tuple(at for at, _, _ in used),
        log=_log(timed),
        cut_lines=sum(
            int(bounded(row.get("lines"), most=1e9) or 0) for _, row in timed if row.get("kind") == "cut"
        ),
    )  # fmt: skip


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


def _log(timed: Sequence[tuple[float, Mapping[str, Any]]]) -> tuple[NodeLine, ...]:
    lines = [(at, row.get("level"), row.get("text")) for at, row in timed if row.get("kind") == "log"]
    return tuple(
        NodeLine(
            time=at,
            level=level if isinstance(level, str) and level in LEVELS else "info",
            text=one_line(text, most=MOST_TEXT),
        )
        for at, level, text in lines[-MOST_LOG_LINES:]
        if isinstance(text, str)
    )
