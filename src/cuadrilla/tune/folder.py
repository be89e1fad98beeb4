"""Names in the folder of a search, `tune/` beside its run file.

study.db        the study of Optuna from which a search goes on
jobs.json       its trials and how each stands, for whoever watches; a search goes on without it
t0003/          the run directory of trial 3
best/run.toml   the best so far, as a run of its own: `cuadrilla train tune/best`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.rundir import RunDir, write_json
from cuadrilla.tune.search import Search, Trial
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

    def run(self, trial: Trial) -> RunDir:
        return RunDir(self.path / trial.name)

    def write_jobs(self, search: Search, *, at: Mapping[str, str], steps: Sequence[int]) -> None:
        """`at`: the places of those that run now. `steps`: of a run at each rung."""
        rows = []
        for trial in search.trials:
            last = trial.results[-1] if trial.results else None
            is_over = search.is_over(trial)
            if is_over:
                state = "failed" if trial.score is None else "complete"
            else:
                state = "running" if trial.name in at else "waiting"
            rows.append(
                {
                    "name": trial.name,
                    "values": describe(trial.values),
                    "state": state,
                    "steps": steps[trial.rung - is_over],
                    "machine": at.get(trial.name, last.place if last else ""),
                    "score": trial.score,
                    "reason": last.reason if last else "",
                }
            )
        write_json(self.path / JOBS, {"jobs": rows}, private=True)


def describe(values: Values) -> str:
    """A combination in one line, short."""
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )
