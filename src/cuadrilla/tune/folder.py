"""Names in the folder of a search, `tune/` beside its run file; what happened, in a file that is only appended to.

search.json     what is searched; a search goes on only with the same
trials.jsonl    what began and ended, in that order: the search is made again from it
t0003-r1/       the run directory of a job: trial 3 at rung 1
best/run.toml   the best so far, as a run of its own: `cuadrilla train tune/best`
best.json       the best so far of a search over a function: what to give to it
study.db        Optuna's study of it, where Optuna is installed (for optuna-dashboard)
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuadrilla.config import Scalar
from cuadrilla.errors import ConfigError
from cuadrilla.home import read_object
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, append_event, read_jsonl, storage_errors, typed, write_json
from cuadrilla.tune.search import Job, Search, TrialResult

BEGUN, LEFT, ENDED, STARTED = "begun", "left", "ended", "started"


@dataclass(frozen=True, kw_only=True)
class JobPart:
    """Of a job that has not ended there."""

    place: str
    seconds: float


@dataclass(frozen=True)
class SearchFolder:
    """Where everything of a search is; creates nothing."""

    path: Path

    @property
    def search(self) -> Path:
        return self.path / "search.json"

    @property
    def trials(self) -> Path:
        return self.path / "trials.jsonl"

    @property
    def best(self) -> RunDir:
        return RunDir(self.path / "best")

    @property
    def best_values(self) -> Path:
        return self.path / "best.json"

    @property
    def study(self) -> Path:
        return self.path / "study.db"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def run(self, job: Job) -> RunDir:
        return RunDir(self.path / job.name)

    def began(self, job: Job, *, place: str) -> None:
        append_event(self.trials, BEGUN, trial=job.trial, rung=job.rung, values=job.values, place=place)

    def ended(self, job: Job, found: TrialResult) -> None:
        """On disk when this returns: a finished trial is never lost."""
        append_event(self.trials, ENDED, trial=job.trial, rung=job.rung, **asdict(found))
        with storage_errors(self.trials), open(self.trials, "rb") as file:
            os.fsync(file.fileno())

    def left(self, job: Job, *, place: str, seconds: float) -> None:
        """Somebody has to go on with it: Ctrl-C, or its machine is gone. `seconds`: what it took there."""
        append_event(self.trials, LEFT, trial=job.trial, rung=job.rung, place=place, seconds=seconds)

    def parts(self) -> dict[tuple[int, int], list[JobPart]]:
        """What was done of jobs that had not ended then."""
        found: dict[tuple[int, int], list[JobPart]] = {}
        for row in read_jsonl(self.trials):
            trial, rung, seconds = row.get("trial"), row.get("rung"), row.get("seconds")
            if row.get("event") != LEFT or not isinstance(trial, int) or not isinstance(rung, int):
                continue
            if isinstance(seconds, int | float):
                part = JobPart(place=str(row.get("place", "")), seconds=float(seconds))
                found.setdefault((trial, rung), []).append(part)
        return found

    def started(self) -> None:
        """A line of its own, whatever a broken-off write has left."""
        with storage_errors(self.trials):
            torn = self.trials.exists() and not self.trials.read_bytes().endswith(b"\n")
            if torn:
                with open(self.trials, "a", encoding="utf-8") as file:
                    file.write("\n")
        append_event(self.trials, STARTED)

    def spent_seconds(self) -> float:
        """Over all starts of the search, up to the last thing that each has written."""
        spent, began, last = 0.0, 0.0, 0.0
        for row in read_jsonl(self.trials):
            now = row.get("time")
            if not isinstance(now, int | float):
                continue
            if row.get("event") == STARTED:
                spent, began = spent + max(last - began, 0.0), now
            last = now
        return spent + max(last - began, 0.0)

    def replay(self, search: Search) -> None:
        """Tell a new `search` what happened. Raises ConfigError if that cannot have been this search."""
        try:
            for kind, job, found in self._happened():
                if kind == ENDED:
                    search.finish(search.jobs[job.key], found)
                elif job.key not in search.jobs:
                    search.restore(job)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                "{path} does not belong together: {reason}",
                path=self.trials,
                reason=error,
                hint="move {folder} away; the search begins anew",
                folder=typed(self.path),
            ) from None

    def _happened(self) -> Iterator[tuple[str, Job, TrialResult]]:
        for row in read_jsonl(self.trials):
            if row.get("event") not in (BEGUN, ENDED):
                continue
            values: dict[str, Scalar] = row.get("values", {})
            job = Job(trial=int(row["trial"]), rung=int(row["rung"]), values=values)
            yield row["event"], job, _found(row)


def _found(row: dict[str, Any]) -> TrialResult:
    """Raises ValueError."""
    score, figures = row.get("score"), row.get("figures", {})
    numbers = [row.get("tokens", 0), row.get("seconds", 0.0), *figures.values(), *([] if score is None else [score])]
    if not all(isinstance(each, int | float) for each in numbers):
        raise ValueError(f"{row.get('trial')}: not a number")
    return TrialResult(
        score=score,
        figures=figures,
        tokens=int(row.get("tokens", 0)),
        seconds=float(row.get("seconds", 0.0)),
        place=str(row.get("place", "")),
        reason=str(row.get("reason", "")),
    )


def check_same(folder: SearchFolder, wanted: dict[str, Any], before: dict[str, Any]) -> None:
    """Raises ConfigError where a search that has begun was another one."""
    changed = sorted(key for key in wanted.keys() | before.keys() if wanted.get(key) != before.get(key))
    if changed:
        raise ConfigError(
            "this search began with other settings: {keys}",
            keys=", ".join(changed),
            hint="put the old values back, or move {folder} away to begin anew",
            folder=typed(folder.path),
        )


def write_search(folder: SearchFolder, wanted: dict[str, Any], more: dict[str, Any]) -> None:
    write_json(folder.search, {"identity": wanted, **more}, private=True)


def read_identity(folder: SearchFolder) -> dict[str, Any]:
    """Raises ConfigError."""
    found = read_object(folder.search).get("identity")
    if not isinstance(found, dict):
        hint = "move {folder} away; the search begins anew"
        raise ConfigError("{path} cannot be read", path=folder.search, hint=hint, folder=typed(folder.path))
    return found


def counted(found: TrialResult) -> Message:
    """How a job ended, in a few words."""
    if found.score is None:
        return Message("failed: {reason}", reason=found.reason)
    return Message("{score:.4f}", score=found.score)
