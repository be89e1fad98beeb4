"""Names in the folder of a search, `tune/` beside its run file.

study.db        the study of Optuna from which a search goes on
jobs.json       its trials and how each stands, for whoever watches; a search goes on without it
t0003/          the run directory of trial 3
best/run.toml   the best so far, as a run of its own: `cuadrilla train tune/best`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuadrilla.rundir import RunDir, write_json
from cuadrilla.tune.search import PLACE, REASON, Search, job_of, score_of

JOBS = "jobs.json"
STATES = {"COMPLETE": "complete", "FAIL": "failed", "PRUNED": "stopped"}
"""Of trials that have ended."""


@dataclass(frozen=True)
class SearchFolder:
    """The paths of a search; creates nothing."""

    path: Path

    @property
    def best(self) -> RunDir:
        return RunDir(self.path / "best")

    @property
    def study(self) -> Path:
        return self.path / "study.db"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def run(self, job: str) -> RunDir:
        return RunDir(self.path / job)

    def write_jobs(self, search: Search, *, at: Mapping[str, str], steps: int) -> None:
        """`at`: the places of those that run now. `steps`: of a run."""
        rows = [
            {
                "name": (job := job_of(trial)),
                "values": describe(trial.params),
                "state": STATES.get(trial.state.name, "running" if job in at else "waiting"),
                "steps": steps,
                "machine": at.get(job, trial.user_attrs.get(PLACE, "")),
                "score": score_of(trial),
                "reason": trial.user_attrs.get(REASON, ""),
            }
            for trial in search.trials
        ]
        write_json(self.path / JOBS, {"jobs": rows}, private=True)


def describe(values: Mapping[str, Any]) -> str:
    """A combination in one line, short."""
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )
