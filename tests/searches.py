"""The folder of a search as `cuadrilla tune` writes it, for tests of what reads it."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.config import TuneSection
from cuadrilla.rundir import write_json
from cuadrilla.runfile import leaves
from cuadrilla.tune.folder import SearchFolder
from cuadrilla.tune.search import Job, Search, TrialResult

SPACE: Mapping[str, Any] = {
    "optim.kind": {"choices": ["muon", "adamw"]},
    "optim.lr": {"low": 0.001, "high": 0.1, "log": True},
    "optim.momentum": {"low": 0.8, "high": 0.98, "when": {"optim.kind": "muon"}},
    "optim.weight_decay": {"low": 0.01, "high": 0.3, "log": True, "when": {"optim.kind": "adamw"}},
    "train.batch_sequences": {"choices": [8, 16, 32]},
    "model.layers": {"low": 2, "high": 8},
}
STEPS = 90
TOKENS = 1000
"""In a step."""
FAILS = 3
"""Trials of this number, and of each seventh after it."""


@dataclass(kw_only=True)
class WrittenSearch:
    """In `RUN/tune`. Scores are best where the learning rate is 0.02; nothing else decides much."""

    run: Path
    num_trials: int = 30
    rungs: int = 2
    section: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> SearchFolder:
        return SearchFolder(self.run / "tune")

    def write(self, *, until: int = 10**9) -> SearchFolder:
        """With the first `until` runs; the next one has begun."""
        told = {"space": SPACE, "sampler": "random", "rungs": self.rungs, "factor": 3, **self.section}
        section = TuneSection.model_validate(told)
        steps = [STEPS // 3 ** (self.rungs - 1 - rung) for rung in range(self.rungs)]
        self.folder.path.mkdir(parents=True)
        identity = {"optim.lr": 0.02, **leaves({"tune": section.model_dump(exclude={"constraints"})})}
        told = {"identity": identity, "num_trials": self.num_trials, "rung_steps": steps}
        constraints = section.model_dump()["constraints"]
        write_json(self.folder.search, {**told, **({"constraints": constraints} if constraints else {})})
        search = Search(
            section,
            suggest=lambda number, _known: drawn(number),
            num_trials=self.num_trials,
            rung_tokens=[each * TOKENS for each in steps],
        )
        self.folder.started()
        while (job := search.next_job()) is not None:
            self.folder.began(job, place="place-1")
            if until <= 0:
                break
            until -= 1
            found = result(job, steps)
            search.finish(job, found)
            self.folder.ended(job, found)
            write_run(self.folder, job, found, steps[job.rung])
        return self.folder


def drawn(number: int) -> dict[str, Any]:
    chance = random.Random(number)
    kind = chance.choice(["muon", "adamw"])
    lr, decay = (10 ** chance.uniform(*ends) for ends in ((-3, -1), (-2, math.log10(0.3))))
    own = {"optim.momentum": chance.uniform(0.8, 0.98)} if kind == "muon" else {"optim.weight_decay": decay}
    batch, layers = chance.choice([8, 16, 32]), chance.randint(2, 8)
    return {"optim.kind": kind, "optim.lr": lr, **own, "train.batch_sequences": batch, "model.layers": layers}


def result(job: Job, steps: Sequence[int]) -> TrialResult:
    if job.trial % 7 == FAILS:
        return TrialResult(score=None, place="place-1", seconds=2.0, reason="the loss is not finite")
    lr, layers = float(job.values["optim.lr"]), float(job.values["model.layers"])
    score = 4 + math.log(lr / 0.02) ** 2 / 4 + 0.02 * (job.trial % 5) - 0.5 * job.rung
    figures = {"val_loss": score, "parameters": 3e5 * layers, "tokens_per_second": 1000.0}
    tokens = (steps[job.rung] - (steps[job.rung - 1] if job.rung else 0)) * TOKENS
    return TrialResult(score=score, figures=figures, tokens=tokens, seconds=10.0 * 3**job.rung, place="place-1")


def write_run(folder: SearchFolder, job: Job, found: TrialResult, steps: int) -> None:
    """Its curve, every ten steps."""
    if found.score is None:
        return
    run = folder.run(job)
    run.path.mkdir()
    points = [(step, found.score + 2 * (1 - step / steps)) for step in range(steps, 0, -10)]
    rows = [{"version": step, "tokens": step * TOKENS, "val_loss": loss} for step, loss in sorted(points)]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
