"""One HTML page about a search for better settings: the best, all trials, what each setting does, how far it came.

`read_search` reads the folder of a search, under way or over, into plain data; `render_search` puts that into one page
(`pages.py`). Anybody may have written the files: they are read up to a limit, what should be a number and is none is
left out, and names, values and reasons are text.
"""

import json
import math
import shlex
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from cuadrilla.config import ConstraintSection, DimensionSection, Scalar, TuneSection
from cuadrilla.errors import ConfigError
from cuadrilla.monitor.crew import RUNNING, state_of
from cuadrilla.monitor.pages import one_page
from cuadrilla.monitor.search_words import WORDS
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, finite_json, last_rows, read_jsonl, read_regular, require_regular
from cuadrilla.runfile import literal
from cuadrilla.tune.folder import BEGUN, ENDED, SearchFolder
from cuadrilla.tune.function import SCORE
from cuadrilla.tune.importance import FEWEST_TRIALS, best_part, importances
from cuadrilla.tune.results import USUAL_METRICS
from cuadrilla.tune.sampler import Known
from cuadrilla.tune.search import Job, Search, TrialResult
from cuadrilla.tune.space import Values

MAX_TRIALS = 1000
"""On the page, the best first: a table of more is read by nobody."""
MAX_ROWS = 400_000
MAX_FILE_BYTES = 2**28
MAX_TRIAL, MAX_RUNGS = 100_000, 8
MAX_SETTINGS = 100
MAX_FIGURES = 200
MAX_TEXT = 300
MAX_NUMBER = 1e300
MAX_COUNT = 2**53 - 1  # what a browser counts exactly
MAX_POINTS = 1000
MAX_CURVES = 8
MAX_REPLAYED = 5000
MAX_IMPORTANT = 5000
SPACE, WHEN = "tune.space.", ".when."
COMPLETE, STOPPED = "complete", "stopped"
CURVE = "val_loss"


@dataclass(frozen=True, kw_only=True)
class SearchAxis:
    """A setting. `kind`: number, log (its logarithm is drawn) or choice."""

    key: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    is_whole: bool = False
    choices: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial by the longest of its runs that has a score, or by its last one. `by_rung`: the score of each."""

    trial: int
    run: str
    rung: int
    score: float | None
    by_rung: list[float | None]
    values: dict[str, float | str]
    state: str
    """finished, failed, running, or broken off: nobody works on it now."""
    reason: str
    missed: list[dict[str, Any]]
    """Constraints: `name`, `value`, `limit`, and whether it is `at_most`."""
    place: str
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """What the page shows; plain data."""

    name: str
    state: str
    made: float
    function: str
    """Whose calls the trials are; empty: they are trainings."""
    metric: str
    maximize: bool
    sampler: str
    num_trials: int
    num_begun: int
    num_runs: int
    num_failed: int
    rungs: list[int]
    """Steps of a run at each; of a function, how many times as long as the shortest call."""
    factor: int
    tokens: int
    seconds: float
    best: dict[str, Any] | None
    """`run`, `score`, `values`, and what to `type`."""
    constraints: list[dict[str, Any]]
    axes: list[SearchAxis]
    trials: list[TrialRow]
    progress: list[dict[str, Any]]
    """For each run, in the order in which they ended: tokens trained until then, its score, the best score so far."""
    curve_metric: str
    curves: list[dict[str, Any]]
    importance: dict[str, Any]
    """`parts` by key, `trials` that it is from, and `problem`: why there is none."""


def is_search(path: Path) -> bool:
    """Whether a folder is that of a search."""
    folder = SearchFolder(path)
    return folder.search.is_file() or folder.trials.is_file()


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Read:
    """A search as its files tell of it. `search` only holds what happened; nobody asks it what is next."""

    folder: SearchFolder
    settings: dict[str, Any]
    dimensions: dict[str, DimensionSection]
    section: TuneSection
    rungs: list[int]
    num_trials: int
    search: Search
    happened: list[tuple[str, Job, TrialResult]]
    axes: list[SearchAxis]

    @property
    def function(self) -> str:
        return _text(self.settings.get("tune.function"))

    @property
    def choices(self) -> set[str]:
        """Settings that are shown by name."""
        return {axis.key for axis in self.axes if axis.kind == "choice"}

    def score(self, key: tuple[int, int]) -> float | None:
        found = self.search.results.get(key)
        return found.score if found else None


def read_search(folder: SearchFolder) -> SearchReport:
    """Raises ConfigError where no search has begun, or its file of trials cannot be read."""
    read = _read(folder)
    if not read.search.jobs:
        hint = "cuadrilla tune RUN begins one"
        raise ConfigError("{path} has no trial to report", path=folder.path, hint=hint)
    results = read.search.results
    trials = _trial_rows(read)
    best = read.search.best
    curve_metric, curves = _curves(read, trials)
    return SearchReport(
        name=_name(folder),
        state=_state(read),
        made=time.time(),
        function=read.function,
        metric=_metric(read),
        maximize=read.section.maximize,
        sampler=read.section.sampler,
        num_trials=read.num_trials,
        num_begun=len({trial for trial, _ in read.search.jobs}),
        num_runs=len(results),
        num_failed=sum(found.score is None for found in results.values()),
        rungs=read.rungs,
        factor=read.section.factor,
        tokens=min(sum(found.tokens for found in results.values()), MAX_COUNT),
        seconds=sum(found.seconds for found in results.values()),
        best=None if best is None else _best(read, best),
        constraints=[{"name": name, **limit.model_dump()} for name, limit in read.section.constraints.items()],
        axes=read.axes,
        trials=trials[:MAX_TRIALS],
        progress=_progress(read),
        curve_metric=curve_metric,
        curves=curves,
        importance=_importance(read),
    )


def _read(folder: SearchFolder) -> _Read:
    said = _object(folder.search)
    identity = said.get("identity")
    settings = identity if isinstance(identity, dict) else {}
    dimensions = _dimensions(settings)
    rungs = [steps for steps in _list(said.get("rung_steps")) if _is_count(steps)][:MAX_RUNGS]
    happened = _happened(folder.trials)
    highest = max((job.rung for _, job, _ in happened), default=0)
    rungs += [0] * (highest + 1 - len(rungs))
    section = _section(settings, num_rungs=len(rungs), constraints=_constraints(folder, said))
    begun = {job.trial for _, job, _ in happened}
    num_trials = said.get("num_trials")
    num_trials = num_trials if _is_count(num_trials) else len(begun)
    search = Search(section, suggest=_nothing, num_trials=num_trials, rung_tokens=[0] * len(rungs))
    for kind, job, found in happened:
        if job.values or job.key not in search.jobs:  # the row of an end has none
            search.jobs[job.key] = job
        if kind == ENDED:
            search.results[job.key] = found
    return _Read(
        folder=folder,
        settings=settings,
        dimensions=dimensions,
        section=section,
        rungs=rungs,
        num_trials=num_trials,
        search=search,
        happened=happened,
        axes=_axes(search, dimensions),
    )


def _nothing(_number: int, _known: Sequence[Known]) -> Values:
    return {}


def _happened(path: Path) -> list[tuple[str, Job, TrialResult]]:
    """Raises ConfigError."""
    try:
        if path.exists():
            require_regular(path, most_bytes=MAX_FILE_BYTES)
    except OSError as error:
        hint = "name the folder of another search"
        raise ConfigError("cannot read {path}: {reason}", path=path, reason=error.strerror, hint=hint) from None
    found = []
    for row in islice(read_jsonl(path), MAX_ROWS):
        kind, trial, rung = row.get("event"), row.get("trial"), row.get("rung")
        if kind not in (BEGUN, ENDED) or not _is_count(trial, MAX_TRIAL) or not _is_count(rung, MAX_RUNGS - 1):
            continue
        found.append((str(kind), Job(trial=int(trial), rung=int(rung), values=_values(row)), _found(row)))
    return found


def _values(row: Mapping[str, Any]) -> Values:
    values: Values = {}
    for key, value in islice(_part(row, "values").items(), MAX_SETTINGS):
        if isinstance(value, str | bool) or _is_number(value):
            values[_text(key)] = _text(value) if isinstance(value, str) else value
    return values


def _found(row: Mapping[str, Any]) -> TrialResult:
    figures = {
        _text(key): float(value)
        for key, value in islice(_part(row, "figures").items(), MAX_FIGURES)
        if _is_number(value)
    }
    score, seconds, tokens = row.get("score"), row.get("seconds"), row.get("tokens")
    return TrialResult(
        score=float(score) if _is_number(score) else None,
        figures=figures,
        tokens=tokens if _is_count(tokens) else 0,
        seconds=float(seconds) if _is_number(seconds) and 0 <= seconds < MAX_COUNT else 0.0,
        place=_text(row.get("place")),
        reason=_text(row.get("reason")),
    )


def _dimensions(settings: Mapping[str, Any]) -> dict[str, DimensionSection]:
    """The settings that are searched, as far as they are said in full."""
    told: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        if key.startswith(SPACE) and WHEN not in key:
            name, _, what = key.removeprefix(SPACE).rpartition(".")
            told.setdefault(name, {})[what] = value
    found = {}
    for name, fields in islice(told.items(), MAX_SETTINGS):
        try:
            found[_text(name)] = DimensionSection.model_validate(fields)
        except ValueError:
            continue
    return found


def _section(settings: Mapping[str, Any], *, num_rungs: int, constraints: dict[str, ConstraintSection]) -> TuneSection:
    keys = ("sampler", "factor", "ahead", "metric", "maximize")
    told = {key: settings[f"tune.{key}"] for key in keys if f"tune.{key}" in settings}
    try:
        return TuneSection.model_validate({**told, "rungs": num_rungs, "constraints": constraints})
    except ValueError:
        return TuneSection(rungs=num_rungs, constraints=constraints)


def _constraints(folder: SearchFolder, said: Mapping[str, Any]) -> dict[str, ConstraintSection]:
    """As the search has written them, or as the run file has them now: they may change while a search goes on."""
    told = said.get("constraints")
    if not isinstance(told, dict):
        try:
            text = read_regular(folder.path.parent / "run.toml", most_bytes=2**20).decode("utf-8-sig")
            told = _part(_part(tomllib.loads(text), "tune"), "constraints")
        except (OSError, ValueError, RecursionError):
            return {}
    found = {}
    for name, limits in islice(told.items(), MAX_FIGURES):
        try:
            found[_text(name)] = ConstraintSection.model_validate(limits)
        except ValueError:
            continue
    return {
        name: limit for name, limit in found.items() if all(_is_limit(each) for each in limit.model_dump().values())
    }


def _is_limit(value: object) -> bool:
    return value is None or _is_number(value)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _name(folder: SearchFolder) -> str:
    return _text(folder.path.resolve().parent.name) or "tune"


def _state(read: _Read) -> str:
    """Whether somebody is at it, or all is done; whoever has stopped can go on."""
    if state_of(RunDir(read.folder.path)) == RUNNING:
        return RUNNING
    return COMPLETE if _is_complete(read) else STOPPED


def _is_complete(read: _Read) -> bool:
    """Whether a search with what has happened would begin nothing more."""
    rungs = [0] * len(read.rungs)
    search = Search(read.section, suggest=_nothing, num_trials=read.num_trials, rung_tokens=rungs)
    if len(read.happened) > MAX_REPLAYED:
        return len(read.search.results) >= search.most_jobs
    try:
        for kind, job, found in read.happened:
            if kind == ENDED:
                search.finish(search.jobs[job.key], found)
            elif job.key not in search.jobs:
                search.restore(job)
        return search.is_idle and search.next_job() is None
    except (KeyError, ValueError):
        return False


def _metric(read: _Read) -> str:
    if read.section.metric:
        return _text(read.section.metric)
    if read.function:
        return SCORE
    known = {name for found in read.search.results.values() for name in found.figures}
    return next((name for name in USUAL_METRICS if name in known), CURVE)


def _trial_rows(read: _Read) -> list[TrialRow]:
    """The best first: those that came farthest, of these the ones that miss no constraint, of these the best score."""
    running = state_of(RunDir(read.folder.path)) == RUNNING
    by_trial: dict[int, list[Job]] = {}
    for key in sorted(read.search.jobs):
        by_trial.setdefault(key[0], []).append(read.search.jobs[key])
    rows = [_trial_row(read, jobs, running=running) for jobs in by_trial.values()]
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _trial_row(read: _Read, jobs: Sequence[Job], *, running: bool) -> tuple[tuple[float, ...], TrialRow]:
    results = read.search.results
    shown = next((job for job in reversed(jobs) if read.score(job.key) is not None), jobs[-1])
    found = results.get(shown.key, TrialResult(score=None))
    violation = read.search.violation(found)
    state, reason = _how_it_stands(jobs[-1], results.get(jobs[-1].key), running=running)
    row = TrialRow(
        trial=shown.trial,
        run=shown.name,
        rung=shown.rung,
        score=found.score,
        by_rung=[read.score((shown.trial, rung)) for rung in range(len(read.rungs))],
        values=_shown_values(read, shown),
        state=state,
        reason=reason,
        missed=_missed(read.section.constraints, found.figures),
        place=next((at.place for job in reversed(jobs) if (at := results.get(job.key))), ""),
        tokens=min(sum(results[job.key].tokens for job in jobs if job.key in results), MAX_COUNT),
        seconds=sum(results[job.key].seconds for job in jobs if job.key in results),
    )
    if found.score is None:
        return (1, 0, 0.0, 0.0, shown.trial), row
    signed = -found.score if read.section.maximize else found.score
    return (0, -shown.rung, violation, signed, shown.trial), row


def _how_it_stands(last: Job, found: TrialResult | None, *, running: bool) -> tuple[str, str]:
    """State and reason of a trial, by its last run."""
    if found is None:
        return (RUNNING if running else "broken off"), ""
    if found.score is not None:
        return "finished", ""
    return "failed", f"{last.name}: {found.reason}" if last.rung else found.reason


def _missed(constraints: Mapping[str, ConstraintSection], figures: Mapping[str, float]) -> list[dict[str, Any]]:
    found = []
    for name, limit in constraints.items():
        value = figures.get(name)
        if value is not None and limit.at_most is not None and value > limit.at_most:
            found.append({"name": name, "value": value, "limit": limit.at_most, "at_most": True})
        if value is not None and limit.at_least is not None and value < limit.at_least:
            found.append({"name": name, "value": value, "limit": limit.at_least, "at_most": False})
    return found


def _shown_values(read: _Read, job: Job) -> dict[str, float | str]:
    """Numbers on axes of numbers; otherwise as the axis writes its choices."""
    choices, shown = read.choices, {axis.key for axis in read.axes}
    return {key: _label(value) if key in choices else value for key, value in job.values.items() if key in shown}


def _label(value: Scalar) -> str:
    """A choice as a run file has it; a text without its quotes."""
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _axes(search: Search, dimensions: Mapping[str, DimensionSection]) -> list[SearchAxis]:
    """A setting that `search.json` does not explain is taken from what was tried."""
    tried: dict[str, list[Scalar]] = {key: [] for key in dimensions}
    for job in search.jobs.values():
        for key, value in job.values.items():
            tried.setdefault(key, []).append(value)
    return [_axis(key, dimensions.get(key), values) for key, values in islice(tried.items(), MAX_SETTINGS)]


def _axis(key: str, dimension: DimensionSection | None, tried: Sequence[Scalar]) -> SearchAxis:
    if (dimension is not None and dimension.choices) or any(isinstance(value, str | bool) for value in tried):
        labels = map(_label, [*(dimension.choices if dimension else ()), *tried])
        return SearchAxis(key=key, kind="choice", choices=list(dict.fromkeys(labels)))
    ends = [] if dimension is None else [dimension.low, dimension.high]
    numbers = [float(value) for value in (*ends, *tried) if isinstance(value, int | float) and _is_number(value)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    is_log = dimension is not None and dimension.log and low > 0
    is_whole = dimension is not None and dimension.is_whole
    return SearchAxis(key=key, kind="log" if is_log else "number", low=low, high=high, is_whole=is_whole)


def _best(read: _Read, best: Job) -> dict[str, Any]:
    return {
        "run": best.name,
        "trial": best.trial,
        "rung": best.rung,
        "score": read.score(best.key),
        "values": _shown_values(read, best),
        **_to_type(read, best),
    }


def _to_type(read: _Read, best: Job) -> dict[str, str]:
    """Commands as they are typed beside the run's folder: a page that is mailed tells no other path. Of a function, the
    arguments to call it with."""
    if read.function:
        return {"arguments": json.dumps(best.values, ensure_ascii=False)}
    path = read.folder.path.resolve()
    folder = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
    folder = f"./{folder}" if folder.startswith("-") else folder
    is_whole = best.rung == len(read.rungs) - 1
    sets = (f"--set {shlex.quote(f'{key}={literal(value)}')}" for key, value in best.values.items())
    return {
        "train": f"cuadrilla train {shlex.quote(f'{folder}/best')}",
        "evaluate": f"cuadrilla eval {shlex.quote(f'{folder}/{best.name}')}" if is_whole else "",
        "sets": " ".join(sets),
    }


def _progress(read: _Read) -> list[dict[str, Any]]:
    """Thinned evenly where there are too many; a run that was the best so far stays."""
    tokens, best = 0, None
    points: list[tuple[dict[str, Any], bool]] = []
    better = max if read.section.maximize else min
    for key, found in _in_order(read):
        tokens = min(tokens + found.tokens, MAX_COUNT)
        if found.score is None:
            continue
        before = best
        if not read.search.violation(found):
            best = found.score if best is None else better(best, found.score)
        run = read.search.jobs[key].name
        point = {"tokens": tokens, "score": found.score, "rung": key[1], "run": run, "best": best}
        points.append((point, best != before))
    every = max(1, math.ceil(len(points) / MAX_POINTS))
    last = len(points) - 1
    return [point for at, (point, new) in enumerate(points) if new or at % every == 0 or at == last][-2 * MAX_POINTS :]


def _in_order(read: _Read) -> list[tuple[tuple[int, int], TrialResult]]:
    """Results in the order in which the runs ended."""
    ended = dict.fromkeys(job.key for kind, job, _ in read.happened if kind == ENDED)
    return [(key, read.search.results[key]) for key in ended]


def _curves(read: _Read, trials: Sequence[TrialRow]) -> tuple[str, list[dict[str, Any]]]:
    """What is measured on held-out data while the best trials train, by tokens: their metric if it is in their rows."""
    found: list[tuple[str, list[dict[str, Any]]]] = []
    for row in trials[:MAX_CURVES]:
        path = RunDir(read.folder.path / row.run).metrics
        try:
            require_regular(path, most_bytes=MAX_FILE_BYTES)
            found.append((row.run, last_rows(path)))
        except (OSError, ConfigError):
            continue
    wanted = read.section.metric
    metric = wanted if any(wanted in each for _, rows in found for each in rows) else CURVE
    curves = [{"run": run, "points": _points(rows, metric)} for run, rows in found]
    return _text(metric), [curve for curve in curves if curve["points"]]


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> list[list[float]]:
    found = {
        int(row["tokens"]): float(row[metric])
        for row in rows
        if _is_count(row.get("tokens")) and _is_number(row.get(metric))
    }
    points = sorted(found.items())
    every = max(1, math.ceil(len(points) / MAX_POINTS))
    return [list(point) for at, point in enumerate(points) if at % every == 0 or at == len(points) - 1]


def _importance(read: _Read) -> dict[str, Any]:
    """From the shortest runs: all trials have one, and they can be compared."""
    sign = -1.0 if read.section.maximize else 1.0
    known = [
        Known(values=read.search.jobs[key].values, score=sign * found.score)
        for key, found in sorted(read.search.results.items())
        if key[1] == 0 and found.score is not None
    ]
    said = {"trials": len(known), "fewest": FEWEST_TRIALS, "parts": [], "best": 0.0}
    if len(known) < FEWEST_TRIALS:
        return {**said, "problem": "few"}
    try:
        parts = importances(read.dimensions, known[:MAX_IMPORTANT])
    except ImportError:
        return {**said, "problem": "optuna"}
    problem = "" if parts else "none"
    return {**said, "parts": list(parts.items()), "best": best_part(len(known)), "problem": problem}


# -- what anybody may have written -------------------------------------------------------------------------------------


def _object(path: Path) -> dict[str, Any]:
    try:
        return _part({"": finite_json(read_regular(path))}, "")
    except (OSError, ValueError, RecursionError):
        return {}


def _part(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return one_line(value, most=MAX_TEXT) if isinstance(value, str) else ""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _is_count(value: object, most: int = MAX_COUNT) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def render_search(report: SearchReport) -> str:
    """The page."""
    return one_page("search_report", asdict(report), words=WORDS)
