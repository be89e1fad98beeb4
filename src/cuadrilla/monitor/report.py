"""One HTML page about a run, complete in itself: curves, machines, what happened, samples, data, configuration.

`read_report` reads the run directory into plain data; `render` puts that into one page (`pages.py`).
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.monitor.attendance import Attendance, mean_shares
from cuadrilla.monitor.crew import state_of
from cuadrilla.monitor.nodes import NodeNow, read_nodes
from cuadrilla.monitor.pages import one_page
from cuadrilla.rundir import RunDir, finite_json, last_rows, read_jsonl, read_regular, require_regular

MAX_POINTS = 2000
"""Of a curve: a page has no more columns of pixels. Longer ones are averaged; evaluated steps keep their place."""
MAX_EVENTS = 1000
MAX_SAMPLES = 200
MAX_SOURCES = 200
MAX_NUMBER = 1e300
MAX_HEADER_BYTES = 10**7
MAX_TIME = 1e11  # seconds; a browser knows dates up to the year 275,760
CHECKED, OVERLAPPING = "val_windows_checked", "val_windows_in_train"  # counts of a manifest
QUIET_EVENTS = ("checkpoint",)
WORDS = (
    Message("Curves"),
    Message("Machines"),
    Message("Samples"),
    Message("What happened"),
    Message("Data"),
    Message("Configuration"),
    Message("Environment of the coordinator"),
    Message("Bold: set by the run file or on the command line."),
    Message("This page draws its curves with JavaScript, which is switched off."),
    Message("cuadrilla report"),
    Message("%s; %swritten %s UTC"),
    Message("running"),
    Message("complete"),
    Message("stopped"),
    Message("failed"),
    Message("waiting"),
    Message("step"),
    Message("tokens"),
    Message("loss"),
    Message("bits per byte"),
    Message("parameters"),
    Message("held-out %s"),
    Message("lowest held-out loss"),
    Message("%s at step %s"),
    Message("tokens/s (median)"),
    Message("bytes per token (%s tokens)"),
    Message("%s of the held-out text is in the training text: its loss looks too good."),
    Message("from first to last event"),
    Message("each step"),
    Message("smoothed"),
    Message("held-out"),
    Message("Loss (logarithmic)"),
    Message("Loss"),
    Message("Held-out %s"),
    Message("+ standard error"),
    Message("− standard error"),
    Message("Tokens per second"),
    Message("tokens/s"),
    Message("Share of each step, %, smoothed"),
    Message("Gradient norm"),
    Message("norm"),
    Message("Learning rate, part of the highest"),
    Message("factor"),
    Message("Dashed lines: %s."),
    Message("step of the sample"),
    Message("step %s"),
    Message("machine"),
    Message("share"),
    Message("joined"),
    Message("lost"),
    Message("last reason"),
    Message("device"),
    Message("waits"),
    Message("last word"),
    Message("time (UTC)"),
    Message("event"),
    Message("details"),
    Message("source or split"),
    Message("licence"),
    Message("bytes"),
    Message("documents"),
    Message("key"),
    Message("value"),
    Message("what"),
    Message("version"),
    Message("left"),
    Message("evicted"),
    Message("late"),
    Message("discarded"),
    Message("redone"),
    Message("coordinator restarted"),
    Message("alarm"),
    Message("finished"),
    Message("memorises"),
    Message("audited"),
    Message("units skipped"),
    Message("update skipped"),
    Message("rolled back to the last checkpoint"),
    Message("gave up"),
    Message("the gradient is exactly zero"),
    Message("non-finite"),
    Message("outlier"),
    Message("outlier confirmed"),
    Message("audit"),
    Message("all-zero gradient"),
    Message("all-zero gradient confirmed"),
)
"""What the page says by itself."""
MEANS = ("loss", "grad_norm", "tokens_per_second", "lr_factor", "seconds")


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """A worker as the run saw it."""

    name: str
    joined: int = 0
    lost: int = 0
    last_reason: str = ""
    share: float | None = None
    """Its mean part of a step; None for a run of one worker, or of a version that did not record it."""
    device: str = ""
    waits: float | None = None
    """Mean part of its last minutes in which it had nothing to compute."""
    word: str = ""
    """Its last line of log."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the page shows; plain data."""

    name: str
    state: str
    made: float
    version: int
    tokens: int
    parameters: int | None
    """Of the newest checkpoint."""
    best: dict[str, Any] | None
    """`version` and `loss` of the lowest held-out loss, which `eval` and `generate` take; None without evaluations."""
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    machines: list[WorkerRow]
    samples: list[dict[str, Any]]
    values: dict[str, Any]
    changed: list[str]
    """Keys of `values` that were set by the run file or on the command line."""
    environment: dict[str, Any]
    data: dict[str, Any]


def read_report(run: RunDir) -> Report:
    """Raises ConfigError when the folder holds no training yet."""
    written = last_rows(run.metrics)
    written = sorted((row for row in written if _is_number(row.get("version"))), key=lambda row: row["version"])
    rows = [_figures(row) for row in written]
    if not rows:
        raise ConfigError("{path} has no training to report", path=run.path, hint="cuadrilla train it first")
    happened = list(read_jsonl(run.events))
    config = _read_object(run.config)
    values = {key: value for key, value in _flat(_part(config, "values")).items() if not key.startswith("alarm.")}
    return Report(
        name=run.path.resolve().name,
        state=state_of(run),
        made=time.time(),
        version=rows[-1]["version"],
        tokens=int(rows[-1].get("tokens") or 0),
        parameters=_num_parameters(run),
        best=_best(rows),
        rows=thinned(rows, most=MAX_POINTS),
        events=_timeline(happened),
        machines=with_nodes(machines(happened, rows), read_nodes(run)),
        samples=_samples(written)[-MAX_SAMPLES:],
        values=values,
        changed=sorted(
            key
            for key, origin in _part(config, "origins").items()
            if origin != "default" and not key.startswith("alarm.")
        ),
        environment=_environment(run),
        data=_data(run, values),
    )


def _best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    measured = [row for row in rows if _is_number(row.get("val_loss"))]
    if not measured:
        return None
    row = min(measured, key=lambda row: float(row["val_loss"]))
    return {"version": row["version"], "loss": row["val_loss"]}


def thinned(rows: Sequence[dict[str, Any]], *, most: int) -> list[dict[str, Any]]:
    """At most about `most` rows in the same order: neighbours become one row of means, at the place of the last."""
    if len(rows) <= most:
        return list(rows)
    size = math.ceil(len(rows) / most)
    return [_mean(rows[first : first + size]) for first in range(0, len(rows), size)]


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(rows[-1])
    for row in rows:  # an evaluation within the piece keeps its value
        merged |= {key: value for key, value in row.items() if key.startswith("val_")}
    for key in MEANS:
        known = [row[key] for row in rows if row.get(key) is not None]
        if known:
            merged[key] = sum(known) / len(known)
    if any("shares" in row for row in rows):
        merged["shares"] = mean_shares([row.get("shares", {}) for row in rows])
    return merged


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """What can be drawn of a row: numbers, gaps, and shares that are numbers. Anybody may have written the file."""
    figures = {key: value for key, value in row.items() if value is None or _is_number(value)}
    shares = {name: value for name, value in _part(row, "shares").items() if _is_number(value)}
    figures.pop("shares", None)
    return figures | ({"shares": shares} if shares else {})


def _is_number(value: object) -> bool:
    """One with which can be reckoned: JSON knows integers beyond any float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _samples(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"version": row["version"], "text": row["sample"]} for row in rows if isinstance(row.get("sample"), str)]


def _environment(run: RunDir) -> dict[str, Any]:
    found = _read_object(run.env)
    return found | {"packages": _part(found, "packages")}


def machines(happened: Iterable[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[WorkerRow]:
    """Everybody who has ever joined, by name."""
    attendance = Attendance()
    for event in happened:
        attendance.take(event)
    shares = mean_shares([row.get("shares", {}) for row in rows])
    return [
        WorkerRow(
            name=name,
            joined=attendant.joined,
            lost=attendant.lost,
            last_reason=attendant.reason,
            share=shares.get(name, 0.0) if shares else None,
        )
        for name, attendant in sorted(attendance.by_name.items())
        if attendant.joined
    ]


def with_nodes(rows: Sequence[WorkerRow], nodes: Sequence[NodeNow]) -> list[WorkerRow]:
    """What machines have said of themselves, beside what the run knows of them."""
    said = {node.name: node for node in nodes}
    return [_with_node(row, said[row.name]) if row.name in said else row for row in rows]


def _with_node(row: WorkerRow, node: NodeNow) -> WorkerRow:
    waits = [percent / 100 for percent in node.history.get("waiting_percent", ()) if percent is not None]
    return replace(
        row,
        device=node.facts.get("device", ""),
        waits=sum(waits) / len(waits) if waits else None,
        word=node.log[-1].text if node.log else "",
    )


def _timeline(happened: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The newest events, without the regular ones; each with the step during which it happened."""
    version, shown = 0, []
    for event in happened:
        version = max(version, event["version"]) if _is_number(event.get("version")) else version
        if event.get("event") not in QUIET_EVENTS:
            details = {key: value for key, value in event.items() if key not in ("time", "event", "version", "units")}
            at: Any = event.get("time")
            if not _is_number(at) or not 0 < at < MAX_TIME:
                at = None
            shown.append({"time": at, "event": str(event.get("event")), "version": version, "details": details})
    return shown[-MAX_EVENTS:]


def _data(run: RunDir, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the data folder's manifest says, if it is on this machine."""
    folder = values.get("data.folder")
    if not folder:
        return {}
    manifest = _read_object(run.path / str(folder) / "manifest.json")
    listed = manifest.get("sources")
    sources = [source for source in listed if isinstance(source, dict)] if isinstance(listed, list) else []
    splits = _part(manifest, "splits")
    counts = _part(manifest, "counts")
    checked, found = (_count(counts.get(name)) for name in (CHECKED, OVERLAPPING))
    return {
        "folder": folder,
        "vocabulary": _count(manifest.get("vocab_size")),
        "leak": found / checked if checked else 0.0,
        "sources": [{key: source.get(key) for key in ("name", "licence", "num_bytes")} for source in sources][
            :MAX_SOURCES
        ],
        "splits": {
            name: {key: split.get(key) for key in ("num_documents", "num_bytes", "num_tokens")}
            for name, split in splits.items()
            if isinstance(split, dict)
        },
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) and _is_number(value) else 0


def _num_parameters(run: RunDir) -> int | None:
    """From the header of the newest checkpoint's weights: 8 bytes of length, then JSON (the safetensors format)."""
    for path in sorted(run.checkpoints.glob("v*/model.safetensors"), reverse=True):
        try:
            require_regular(path)
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = _part({"": finite_json(file.read(min(size, MAX_HEADER_BYTES)))}, "")
            shapes = [_part(header, name).get("shape") for name in header if name != "__metadata__"]
            return sum(math.prod(map(int, shape)) for shape in shapes if isinstance(shape, list))
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            continue
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none that can be read: a report shows what is left of a run."""
    try:
        return _part({"": finite_json(read_regular(path))}, "")
    except (OSError, ValueError, RecursionError):
        return {}


def _part(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def render(report: Report) -> str:
    """The page."""
    return one_page("report", asdict(report), words=WORDS)
