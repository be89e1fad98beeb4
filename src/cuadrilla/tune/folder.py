"""Names in the folder of a search, `tune/` beside its run file.

study.db        the studies of Optuna from which a search goes on
jobs.json       its runs and how each stands, for whoever watches; a search goes on without it
t0003-r1/       the run directory of a job: trial 3 at rung 1
best/run.toml   the best so far, as a run of its own: `cuadrilla train tune/best`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.rundir import RunDir, write_json
from cuadrilla.tune.search import Job, Search
from cuadrilla.tune.space import Values

JOBS = "jobs.json"


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

    def run(self, job: Job) -> RunDir:
        return RunDir(self.path / job.name)

    def write_jobs(self, search: Search, *, at: Mapping[str, str], steps: Sequence[int]) -> None:
        """`at`: the places of those that run now. `steps`: of a run at each rung."""
        rows = []
        for key, job in search.jobs.items():
            found, place = search.results.get(key), at.get(job.name, "")
            row = {"name": job.name, "values": describe(job.values), "steps": steps[job.rung], "machine": place}
            if found is not None:
                state = "failed" if found.score is None else "complete"
                row |= {"state": state, "machine": found.place, "score": found.score, "reason": found.reason}
            rows.append({"state": "running" if place else "waiting", **row})
        write_json(self.path / JOBS, {"jobs": rows}, private=True)


def describe(values: Values) -> str:
    """A combination in one line, short."""
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )
