"""The folder of a search, written as `cuadrilla tune` writes it, for tests of its readers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.storages import InMemoryStorage

from cuadrilla.config import TuneSection
from cuadrilla.jobs.executor import Ended
from cuadrilla.tune.folder import SearchFolder
from cuadrilla.tune.search import Search
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
"""The trial with this number fails, and each seventh after it."""


@dataclass(kw_only=True)
class WrittenSearch:
    """A search in `RUN/tune`. Scores are best at a learning rate of 0.02; the other settings matter little."""

    run: Path
    num_trials: int = 30

    @property
    def folder(self) -> SearchFolder:
        return SearchFolder(self.run / "tune")

    def write(self, *, until: int = 10**9) -> SearchFolder:
        """Write the search after its first `until` trials; the next one has begun."""
        section = TuneSection.model_validate({"space": SPACE, "sampler": "random", "trials": self.num_trials})
        text = "[data]\nfolder = 'data'\n[train]\nsteps = 90\n"
        self.folder.path.mkdir(parents=True)
        search = Search(section, space=Space(section, text=text), storage=InMemoryStorage())
        while (job := search.next_job()) is not None:
            self.folder.write_jobs(search, at={job: "place-1"}, steps=STEPS)
            if until <= 0:
                break
            until -= 1
            score = score_of(search, job)
            reason = "the loss is not finite" if score is None else ""
            search.finish(Ended(job=job, place="place-1", seconds=2.0, reason=reason), score=score)
            self.folder.write_jobs(search, at={}, steps=STEPS)
            if score is not None:
                write_run(self.folder, job, score)
        return self.folder


def score_of(search: Search, job: str) -> float | None:
    trial = search.trial(job)
    if trial.number % 7 == FAILS:
        return None
    return 4 + math.log(trial.params["optim.lr"] / 0.02) ** 2 / 4 + 0.02 * (trial.number % 5)


def write_run(folder: SearchFolder, job: str, score: float) -> None:
    """Write the metrics of a trial's run: a loss every ten steps."""
    run = folder.run(job)
    run.path.mkdir(exist_ok=True)
    points = [(step, score + 2 * (1 - step / STEPS)) for step in range(10, STEPS + 1, 10)]
    rows = [{"version": step, "tokens": step * 1000, "val_loss": loss} for step, loss in points]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
