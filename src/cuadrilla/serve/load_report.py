"""What is kept of a load test: its figures as JSON, one HTML page complete in itself, and two tests side by side.

The JSON (`schema` 1) has the target, what was asked, the client, a list of stages as `load_stats.summarise` has them,
and of a sweep the knee. The page loads nothing (its policy forbids it); what comes from the server enters it as data
and is shown as text.
"""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message, language
from cuadrilla.rundir import finite_json, read_regular
from cuadrilla.serve.load import LoadPlan, LoadRun
from cuadrilla.serve.load_stats import knee, summarise
from cuadrilla.version import __version__

SCHEMA = 1
KIND = "cuadrilla load"
MOST_BYTES = 50 * 2**20
NOTABLE = (
    "api", "rate", "clients", "sweep",
    "prompt_tokens", "max_tokens", "temperature", "fields", "prompts", "seconds", "requests", "warm_up", "slo",
    "seed",
)  # fmt: skip
"""Settings that must be the same in two tests that are compared."""

ERRORS = (
    Message("connection"),
    Message("time-out"),
    Message("broken stream"),
    Message("malformed answer"),
    Message("answer too large"),
    Message("more text than asked for"),
    Message("not a stream"),
    Message("error in the stream"),
    Message("finish_reason error"),
    Message("not sent"),
)
"""`load_client.KINDS`, as a person reads them."""
BROKE = {
    "goodput": Message("less than 90 % of the requests were answered within the limits"),
    "backlog": Message("requests came faster than answers"),
    "ttft": Message("p99 of the time to the first token was over its limit"),
    "client": Message("this client was the limit, not the server"),
}
WORDS = (
    Message("Load test"),
    Message("Figures"),
    Message("Over all stages"),
    Message("One stage"),
    Message("Latencies: p50 · p90 · p99, in milliseconds."),
    Message("Errors"),
    Message("What was asked"),
    Message("This page draws its curves with JavaScript, which is switched off."),
    Message("open loop: requests arrive at random, at a rate"),
    Message("closed loop: each client waits for its answer"),
    Message("%s, %s; %s; written %s UTC by cuadrilla %s"),
    Message("The test was interrupted: these are the figures until then."),
    Message("At %s this client was a limit itself: its figures are not the server's."),
    Message("the knee"),
    Message("%s requests/s; at %s %s"),
    Message("none up to %s requests/s"),
    Message("below %s requests/s: %s"),
    Message("requests/s offered"),
    Message("clients"),
    Message("%s/s"),
    Message("1 client"),
    Message("%s clients"),
    Message("requests/s"),
    Message("tokens/s"),
    Message("goodput/s"),
    Message("within the limits"),
    Message("answered"),
    Message("errors"),
    Message("kind"),
    Message("count"),
    Message("example"),
    Message("stage"),
    Message("setting"),
    Message("value"),
    Message("first token p50"),
    Message("first token p99"),
    Message("between tokens p50"),
    Message("between tokens p99"),
    Message("whole answer p50"),
    Message("whole answer p99"),
    Message("Time to the first token, ms"),
    Message("Between two tokens, ms"),
    Message("Whole answer, ms"),
    Message("Requests per second"),
    Message("Tokens per second"),
    Message("Percentiles, ms (logarithmic)"),
    Message("By the second of arrival, ms"),
    Message("percentile"),
    Message("second"),
    Message("first token"),
    Message("first token, slowest"),
    Message("between tokens"),
    Message("whole answer"),
    Message("whole answer, slowest"),
    Message("as offered"),
    *BROKE.values(),
    *ERRORS,
)
"""Of the page; `load.js` finds them by the English text."""


def result(plan: LoadPlan, run: LoadRun, *, options: Mapping[str, Any], made: float | None = None) -> dict[str, Any]:
    """Everything about a test, as JSON. `options`: what was asked for, without a secret."""
    stages = [summarise(stage, slo=plan.slo) for stage in run.stages]
    found = {
        "schema": SCHEMA,
        "kind": KIND,
        "made": time.time() if made is None else made,
        "complete": run.is_complete,
        "target": {"url": plan.target.url, "api": plan.target.api, "model": run.asking.model},
        "options": dict(options),
        "slo": asdict(plan.slo),
        "characters_per_token": run.asking.characters_per_token,
        "client": {
            "cuadrilla": __version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "cpus": os.cpu_count(),
        },
        "stages": stages,
        "knee": knee(stages, slo=plan.slo) if plan.is_sweep else None,
    }
    text = json.dumps(found, ensure_ascii=False).encode(errors="replace")  # a server may send halves of characters
    told: dict[str, Any] = json.loads(text)
    return told


# -- two tests side by side --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadRatio:
    """A figure of two tests. `better`: whether the second has the better one; None: no difference, or none to judge."""

    stage: str
    figure: str
    first: float | None
    second: float | None
    ratio: float | None = None
    better: bool | None = None
    is_time: bool = False
    """In seconds."""


MORE, LESS = True, False
FIGURES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    (Message("requests/s"), ("requests_per_second",), MORE),
    (Message("tokens/s"), ("tokens_per_second",), MORE),
    (Message("goodput/s"), ("goodput_per_second",), MORE),
    (Message("first token p50"), ("ttft_seconds", "p50"), LESS),
    (Message("first token p99"), ("ttft_seconds", "p99"), LESS),
    (Message("between tokens p50"), ("itl_seconds", "p50"), LESS),
    (Message("between tokens p99"), ("itl_seconds", "p99"), LESS),
    (Message("whole answer p50"), ("e2e_seconds", "p50"), LESS),
    (Message("whole answer p99"), ("e2e_seconds", "p99"), LESS),
    (Message("errors"), ("counts", "failed"), LESS),
)


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[LoadRatio]:
    """The stages that both have; of two sweeps the knees, of two single stages these, whatever their rates."""
    rows = []
    for one, other in pairs(first["stages"], second["stages"]):
        for figure, path, more_is_better in FIGURES:
            row = _ratio(stage_name(one), figure, _at(one, path), _at(other, path), more_is_better)
            rows.append(replace(row, is_time=path[0].endswith("_seconds")))
    knees = [test.get("knee") or {} for test in (first, second)]
    if all(found.get("rate") for found in knees):
        rows.append(_ratio("", Message("the knee"), knees[0]["rate"], knees[1]["rate"], MORE))
    return rows


def pairs(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Stages of the same kind and the same rate or number of clients."""
    others = {stage_name(stage): stage for stage in second}
    found = [(stage, others[stage_name(stage)]) for stage in first if stage_name(stage) in others]
    if not found and len(first) == len(second) == 1:
        return [(first[0], second[0])]
    return found


def stage_name(stage: Mapping[str, Any]) -> str:
    """As `12/s` or `4 clients`."""
    if stage["mode"] == "open":
        return Message("{rate}/s", rate=f"{stage['rate']:g}")
    return Message("1 client") if stage["clients"] == 1 else Message("{number} clients", number=stage["clients"])


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Settings that are not the same, so that figures may differ for that reason."""
    one, other = ({**test["options"], "slo": test["slo"], "api": test["target"].get("api")} for test in (first, second))
    return [name for name in NOTABLE if one.get(name) != other.get(name)]


def _at(stage: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = stage
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _ratio(stage: str, figure: str, first: float | None, second: float | None, more_is_better: bool) -> LoadRatio:
    row = LoadRatio(stage=stage, figure=figure, first=first, second=second)
    if first is None or second is None or first == second:
        return replace(row, ratio=1.0 if first and first == second else None)
    return replace(row, ratio=second / first if first else None, better=(second > first) == more_is_better)


def read_result(path: Path) -> dict[str, Any]:
    """A file that `--out` has written. Raises ConfigError."""
    hint = "name a file that `cuadrilla load URL --out FILE.json` has written"
    try:
        value = finite_json(read_regular(path, most_bytes=MOST_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError("cannot read {path}: {reason}", path=path, reason=error.strerror, hint=hint) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("kind") != KIND or not _is_whole(value):
        raise ConfigError("{path} is not the result of a load test", path=path, hint=hint)
    if value.get("schema") != SCHEMA:
        raise ConfigError(
            "{path} was written by another version of cuadrilla (schema {schema})",
            path=path,
            schema=value.get("schema"),
            hint="measure again, or compare with that version",
        )
    return value


def _is_whole(value: Mapping[str, Any]) -> bool:
    stages = value.get("stages")
    return (
        all(isinstance(value.get(name), dict) for name in ("target", "options", "slo"))
        and isinstance(stages, list)
        and all(isinstance(stage, dict) and stage.get("mode") in ("open", "closed") for stage in stages)
        and all(
            isinstance(stage.get("rate" if stage["mode"] == "open" else "clients"), int | float) for stage in stages
        )
    )


# -- the page ----------------------------------------------------------------------------------------------------------


def render_load(found: Mapping[str, Any]) -> str:
    """The page about a result."""
    here, shared = resources.files("cuadrilla.serve"), resources.files("cuadrilla.monitor")
    words = {str(word): word.in_language(language()) for word in WORDS}
    # "<" never appears inside the script element that holds the data: nothing there can end it.
    data = json.dumps({**found, "words": words}, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    parts = {
        **words,
        "LANGUAGE": language(),
        "STYLE": (shared / "vendor" / "uPlot.min.css").read_text() + (shared / "report.css").read_text("utf-8"),
        "CHARTS": (shared / "vendor" / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "SCRIPT": (here / "load.js").read_text(encoding="utf-8"),
        "DATA": data.encode(errors="replace").decode(),
    }
    before, *pieces = (here / "load.html").read_text(encoding="utf-8").split("%%")
    return before + "".join(parts.get(piece, piece) for piece in pieces)
