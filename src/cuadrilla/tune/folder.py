"""Names in the folder of a search, `tune/` beside its run file.

study.db        the study of Optuna from which a search goes on
jobs.json       its trials and how each stands, for whoever watches; a search goes on without it
t0003/          the run directory of trial 3
best/run.toml   the best so far, as a run of its own: `cuadrilla train tune/best`

A trial's run file says everything, the best one's what the search's own says and no more.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from cuadrilla.config import SCHEMA, Config, LocalEngine
from cuadrilla.rundir import RunDir, last_rows, make_private, write_atomic, write_json
from cuadrilla.runfile import Resolved, as_sets, dump, leaves, resolve, to_toml
from cuadrilla.tune.search import PLACE, REASON, Search, job_of, score_of
from cuadrilla.tune.space import Values

JOBS = "jobs.json"
STATES = {"COMPLETE": "complete", "FAIL": "failed", "PRUNED": "stopped"}
"""Of trials that have ended."""
USUAL_METRICS = ("val_bits_per_byte", "val_loss")


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


@dataclass(frozen=True, kw_only=True)
class Base:
    """The part that all trials share: a run file's text, its folder, and the settings typed over it."""

    text: str
    folder: Path
    sets: tuple[str, ...]

    def _resolved(self, values: Values) -> Resolved:
        return resolve(self.text, sets=[*self.sets, *as_sets(values)])

    def settled(self, values: Values) -> tuple[Config, int]:
        """A combination's whole run, for a folder in `tune/`, with nothing left open; and its steps.

        Loads the task. Raises ConfigError, DataError, TaskError, ResourceError.
        """
        from cuadrilla.plan.decide import decide
        from cuadrilla.train.setup import make_task, measure_length

        config = self._resolved(values).config.for_others().model_copy(update={"engine": LocalEngine()})
        with TemporaryDirectory(dir=self.folder / "tune") as name:
            folder = Path(name)
            config, _ = decide(_seen_from(folder, config, base=self.folder), RunDir(folder))
            return config, measure_length(config, make_task(config, folder)).num_steps

    def make_trial(self, values: Values, run: RunDir) -> RunDir:
        """A trial's run directory with its run file, unless it is there. Raises as `settled`."""
        config, _ = self.settled(values)
        if not run.run_file.exists():
            make_private(run.path)
            write_atomic(run.run_file, to_toml(config), private=True)
        return run

    def run_file(self, values: Values, *, folder: Path) -> str:
        """A combination as a run file for `folder`, with what this one says and no more. Raises ConfigError."""
        resolved = self._resolved(values)
        found = leaves(dump(_seen_from(folder, resolved.config, base=self.folder)))
        sections: dict[str, Any] = {"schema": SCHEMA}
        for key, origin in resolved.origins.items():
            section, _, name = key.partition(".")
            if origin != "default" and name and section != "tune" and found[key] is not None:
                sections.setdefault(section, {})[name] = found[key]
        return tomli_w.dumps(sections)


def _seen_from(folder: Path, config: Config, *, base: Path) -> Config:
    """The settings with paths that lead to the same files from another folder."""

    def moved(path: str) -> str:
        return os.path.relpath(base / path, folder) if path and not os.path.isabs(path) else path

    teachers = [moved(teacher) for teacher in config.train.teacher]
    return config.moved(moved).model_copy(
        update={
            "model": config.model.model_copy(update={"init": moved(config.model.init)}),
            "train": config.train.model_copy(update={"teacher": teachers}),
        }
    )


def discard_weights(run: RunDir) -> None:
    """Free the disk of a run that has ended."""
    for path in (run.checkpoints, run.journal, run.tensorboard):
        shutil.rmtree(path, ignore_errors=True)


def read_scores(run: RunDir, metric: str) -> dict[int, float]:
    """Of a run, by its steps. `metric` "": the usual one."""
    rows = last_rows(run.metrics)
    name = metric or next((name for name in USUAL_METRICS if any(name in row for row in rows)), USUAL_METRICS[-1])
    return {row["version"]: float(row[name]) for row in rows if row.get(name) is not None and "version" in row}
