"""A trial's run directory, with a run file in which everything is said.

A rung's run has a schedule of its own: it cools down, and its score is that of a finished run. The steps before the
cooling down are those of any longer run, so the longer one goes back to there and goes on: the warm-up has the same
number of steps in all rungs, and a checkpoint of the last step before the cooling down is kept.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from cuadrilla.config import SCHEMA, Config, LocalEngine, TuneSection
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, last_rows, make_private, read_jsonl, write_atomic
from cuadrilla.runfile import dump, leaves, literal, resolve, to_toml
from cuadrilla.tune.search import RunResult, Trial
from cuadrilla.tune.space import Values

USUAL_METRICS = ("val_bits_per_byte", "val_loss")


@dataclass(frozen=True, kw_only=True)
class Base:
    """The part that all trials share: a run file's text, its folder, and the settings typed over it."""

    text: str
    folder: Path
    sets: tuple[str, ...]
    section: TuneSection

    def settled(self, values: Values) -> tuple[Config, int]:
        """A combination's whole run, for a folder in `tune/`, with nothing left open; and its steps.

        Loads the task. Raises ConfigError, DataError, TaskError, ResourceError.
        """
        from cuadrilla.train.setup import make_task, measure_length

        chosen = [f"{key}={literal(value)}" for key, value in values.items()]
        config = resolve(self.text, sets=[*self.sets, *chosen]).config.for_others()
        config = config.model_copy(update={"engine": LocalEngine()})
        with TemporaryDirectory(dir=self.folder / "tune") as name:
            folder = Path(name)
            config, _ = decide(_seen_from(folder, config, base=self.folder), RunDir(folder))
            return config, measure_length(config, make_task(config, folder)).num_steps

    def run_file(self, values: Values, *, folder: Path) -> str:
        """A combination as a run file for `folder`, with what this one says and no more. Raises ConfigError."""
        chosen = [f"{key}={literal(value)}" for key, value in values.items()]
        resolved = resolve(self.text, sets=[*self.sets, *chosen])
        found = leaves(dump(_seen_from(folder, resolved.config, base=self.folder)))
        sections: dict[str, Any] = {"schema": SCHEMA}
        for key, origin in resolved.origins.items():
            section, _, name = key.partition(".")
            if origin != "default" and name and section != "tune" and found[key] is not None:
                sections.setdefault(section, {})[name] = found[key]
        return tomli_w.dumps(sections)


@dataclass(frozen=True, kw_only=True)
class RungLength:
    """The length of a run at one rung.

    `warmup`: a part of it. `keep_step`: the last step before it cools down (0: keep none).
    """

    steps: int
    warmup: float
    keep_step: int


def rung_lengths(config: Config, section: TuneSection, *, num_steps: int) -> list[RungLength]:
    """The length of each rung's runs, the shortest first. Raises ConfigError where it would be no training."""
    shortest = num_steps // section.factor ** (section.rungs - 1)
    if shortest < 1:
        raise ConfigError(
            "a run of {steps} steps has no room for {rungs} rungs",
            steps=num_steps,
            rungs=section.rungs,
            hint="fewer rungs, a smaller factor, or longer runs",
        )
    lengths = []
    for rung in range(section.rungs):
        steps = num_steps // section.factor ** (section.rungs - 1 - rung)
        warmup = config.schedule.warmup * shortest / steps
        keep_step = int((1 - config.schedule.cooldown) * steps) if rung < section.rungs - 1 else 0
        lengths.append(RungLength(steps=steps, warmup=warmup, keep_step=keep_step))
    return lengths


def make_trial(trial: Trial, base: Base, *, folder: Path) -> RunDir:
    """A trial's run directory with the run file of its rung, unless it is there. Raises as `Base.settled`."""
    run = RunDir(folder)
    config, num_steps = base.settled(trial.values)
    lengths = rung_lengths(config, base.section, num_steps=num_steps)
    length = lengths[trial.rung]
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"steps": length.steps, "tokens": 0, "epochs": 0.0}),
            "schedule": config.schedule.model_copy(update={"warmup": length.warmup}),
            "checkpoint": config.checkpoint.model_copy(
                update={"keep_steps": [length.keep_step] if length.keep_step else []}
            ),
        }
    )
    text = to_toml(config)
    if not run.run_file.exists() or run.run_file.read_text(encoding="utf-8") != text:
        make_private(folder)
        if trial.rung:
            _go_back(run, lengths[trial.rung - 1].keep_step)
        write_atomic(run.run_file, text, private=True)
    return run


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


def _go_back(run: RunDir, step: int) -> None:
    """To the checkpoint from which a longer run goes on, or to the beginning if there is none."""
    kept = run.checkpoints / f"v{step:08d}"
    discard_weights(run, but=kept.name)
    rows = read_jsonl(run.metrics) if kept.is_dir() else ()
    before = [row for row in rows if isinstance(at := row.get("version"), int) and at <= step]
    write_atomic(run.metrics, "".join(f"{json.dumps(row)}\n" for row in before), private=True)
    run.config.unlink(missing_ok=True)


def discard_weights(run: RunDir, *, but: str = "") -> None:
    """Free the disk of a run that has ended."""
    for path in (*run.checkpoints.glob("v*"), run.journal, run.tensorboard):
        if path.name != but:
            shutil.rmtree(path, ignore_errors=True)


def read_result(run: RunDir, section: TuneSection, *, seconds: float, place: str) -> RunResult:
    """The result of a complete run."""
    rows = last_rows(run.metrics)
    name = section.metric or next((name for name in USUAL_METRICS if any(name in row for row in rows)), "val_loss")
    scores = [float(row[name]) for row in rows if row.get(name) is not None]
    if not scores:
        known = ", ".join(sorted({key for row in rows for key in row}))
        reason = Message("no step has {name}; there are {known}", name=name, known=known)
        return RunResult(score=None, seconds=seconds, place=place, reason=reason)
    return RunResult(score=max(scores) if section.maximize else min(scores), seconds=seconds, place=place)
