"""Names in the folder of a search, `tune/` beside its run file.

study.db        the studies of Optuna from which a search goes on
search.json     what is searched; a search goes on only with the same
trials.jsonl    what began and ended, for whoever watches; a search goes on without it
t0003-r1/       the run directory of a job: trial 3 at rung 1
best/run.toml   the best so far, as a run of its own: `cuadrilla train tune/best`
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.home import read_object
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, append_event, read_jsonl, typed, write_json
from cuadrilla.tune.search import Job, JobPart, Search, TrialResult

BEGUN, LEFT, ENDED, STARTED = "begun", "left", "ended", "started"


@dataclass(frozen=True)
class SearchFolder:
    """The paths of a search; creates nothing."""

    path: Path

    @property
    def exists(self) -> bool:
        return self.search.is_file() or self.trials.is_file()

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
    def study(self) -> Path:
        return self.path / "study.db"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def run(self, job: Job) -> RunDir:
        return RunDir(self.path / job.name)

    def began(self, job: Job, *, place: str) -> None:
        append_event(self.trials, BEGUN, trial=job.trial, rung=job.rung, values=job.values, place=place)

    def ended(self, job: Job, found: TrialResult) -> None:
        append_event(self.trials, ENDED, trial=job.trial, rung=job.rung, **asdict(found))

    def left(self, job: Job, part: JobPart) -> None:
        """Somebody has to go on with it: Ctrl-C, or its machine is gone."""
        append_event(self.trials, LEFT, trial=job.trial, rung=job.rung, **asdict(part))

    def started(self, search: Search) -> None:
        """A start of the search, with the end of each job that a killed process has not written here."""
        told = {(row.get("trial"), row.get("rung")) for row in read_jsonl(self.trials) if row.get("event") == ENDED}
        append_event(self.trials, STARTED)
        for key in search.results.keys() - told:
            self.ended(search.jobs[key], search.results[key])


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


def write_search(folder: SearchFolder, wanted: dict[str, Any], *, rung_steps: Sequence[int]) -> None:
    write_json(folder.search, {"identity": wanted, "rung_steps": rung_steps}, private=True)


def read_identity(folder: SearchFolder) -> dict[str, Any]:
    """Raises ConfigError."""
    found = read_object(folder.search).get("identity")
    if not isinstance(found, dict):
        hint = "move {folder} away; the search begins anew"
        raise ConfigError("{path} cannot be read", path=folder.search, hint=hint, folder=typed(folder.path))
    return found


def counted(found: TrialResult) -> Message:
    """The end of a job in a few words."""
    if found.score is None:
        return Message("failed: {reason}", reason=found.reason)
    return Message("{score:.4f}", score=found.score)
