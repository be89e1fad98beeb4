"""Names in the folder of a search, `tune/` beside its run file.

study.db        the study of Optuna from which a search goes on
t0003/          the run directory of trial 3
best/run.toml   the run file of the best so far, as a run of its own: `cuadrilla train tune/best`

A trial's run file has every setting.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuadrilla.config import Config, LocalEngine
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, last_rows, make_private, write_atomic
from cuadrilla.runfile import has_begun, to_toml

TUNE, BEST = "tune", "best"
USUAL_METRICS = ("val_bits_per_byte", "val_loss")


def make_trial(run: RunDir, config: Config) -> None:
    """Make a trial's run directory with its run file, unless it exists. `config`: the search's run file with the
    trial's values. Raises ConfigError, DataError, ResourceError."""
    if not run.run_file.exists():
        make_private(run.path)
        config = config.for_others().model_copy(update={"engine": LocalEngine()})
        config, _ = decide(_moved_to(run.path, config, base=run.path.parents[1]), run)
        write_atomic(run.run_file, to_toml(config), private=True)


def keep_best(trial: RunDir, best: RunDir) -> None:
    """Copy a trial's run file as the run `best`, unless that run has begun. Raises ResourceError."""
    if not has_begun(best):
        make_private(best.path)
        write_atomic(best.run_file, trial.run_file.read_bytes(), private=True)


def describe(values: Mapping[str, Any]) -> str:
    """A combination in one line, short."""
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def _moved_to(folder: Path, config: Config, *, base: Path) -> Config:
    """The settings, whose paths are relative to `base`, with paths to the same files from `folder`."""

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
    """Delete checkpoints, journal and TensorBoard files of a run that has ended, to free the disk."""
    for path in (run.checkpoints, run.journal, run.tensorboard):
        shutil.rmtree(path, ignore_errors=True)


def read_scores(run: RunDir, metric: str) -> dict[int, float]:
    """Scores of a run, by step. `metric` "": the first of USUAL_METRICS that the run has."""
    rows = last_rows(run.metrics)
    name = metric or next((name for name in USUAL_METRICS if any(name in row for row in rows)), USUAL_METRICS[-1])
    return {row["version"]: float(row[name]) for row in rows if row.get(name) is not None and "version" in row}
