"""The folder of a search as `cuadrilla tune` writes it, for tests of what reads it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.storages import InMemoryStorage

from cuadrilla.config import TuneSection
from cuadrilla.tune.folder import SearchFolder
from cuadrilla.tune.search import RunResult, Search, Trial
from cuadrilla.tune.space import Space

SPACE: Mapping[str, Any] = {
    "optim.kind": {"choices": ["muon", "adamw"]},
    "optim.lr": {"low": 0.001, "high": 0.1, "log": True},
    "optim.momentum": {"low": 0.8, "high": 0.98},
    "optim.weight_decay": {"low": 0.01, "high": 0.3, "log": True},
    "train.batch_sequences": {"choices": [8, 16, 32]},
    "model.layers": {"low": 2, "high": 8},
}
STEPS = 90
FAILS = 3
"""Trials of this number, and of each seventh after it."""


@dataclass(kw_only=True)
class WrittenSearch:
    """In `RUN/tune`. Scores are best where the learning rate is 0.02; nothing else decides much."""

    run: Path
    num_trials: int = 30
    rungs: int = 2

    @property
    def folder(self) -> SearchFolder:
        return SearchFolder(self.run / "tune")

    def write(self, *, until: int = 10**9) -> SearchFolder:
        """With the first `until` runs; the next one has begun."""
        told = {"space": SPACE, "sampler": "random", "rungs": self.rungs, "factor": 3, "trials": self.num_trials}
        text = "[data]\nfolder = 'data'\n[train]\nsteps = 90\n"
        section = TuneSection.model_validate(told)
        steps = [STEPS // 3 ** (self.rungs - 1 - rung) for rung in range(self.rungs)]
        self.folder.path.mkdir(parents=True)
        search = Search(section, space=Space(section, text=text), storage=InMemoryStorage())
        while (trial := search.next_trial()) is not None:
            self.folder.write_jobs(search, at={trial.name: "place-1"}, steps=steps)
            if until <= 0:
                break
            until -= 1
            found, length = result(trial), steps[trial.rung]
            search.finish(trial, found)
            self.folder.write_jobs(search, at={}, steps=steps)
            write_run(self.folder, trial, found, length)
        return self.folder


def result(trial: Trial) -> RunResult:
    if trial.number % 7 == FAILS:
        return RunResult(score=None, place="place-1", seconds=2.0, reason="the loss is not finite")
    lr = float(trial.values["optim.lr"])
    score = 4 + math.log(lr / 0.02) ** 2 / 4 + 0.02 * (trial.number % 5) - 0.5 * trial.rung
    return RunResult(score=score, seconds=10.0 * 3**trial.rung, place="place-1")


def write_run(folder: SearchFolder, trial: Trial, found: RunResult, steps: int) -> None:
    """Its curve, every ten steps."""
    if found.score is None:
        return
    run = folder.run(trial)
    run.path.mkdir(exist_ok=True)
    points = [(step, found.score + 2 * (1 - step / steps)) for step in range(steps, 0, -10)]
    rows = [{"version": step, "tokens": step * 1000, "val_loss": loss} for step, loss in sorted(points)]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
