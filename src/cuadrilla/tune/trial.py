"""A trial's run directory: a run file in which everything is said, and what a shorter run of the same trial left to it.

A rung's run has a schedule of its own: it cools down, and its score is that of a finished run. The steps before the
cooling down are those of any longer run, so the longer one goes on from there: the warm-up has the same number of steps
in all rungs, and a checkpoint of the last step before the cooling down is kept.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from cuadrilla.config import SCHEMA, Config, LocalEngine, TuneSection
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, last_rows, make_private, read_jsonl, storage_errors, write_atomic
from cuadrilla.runfile import dump, leaves, literal, resolve, to_toml
from cuadrilla.tune.search import Job, TrialResult
from cuadrilla.tune.space import Values

if TYPE_CHECKING:
    from cuadrilla.train.setup import Length


USUAL_METRICS = ("val_bits_per_byte", "val_loss")


@dataclass(frozen=True, kw_only=True)
class Base:
    """The part that all trials share: a run file's text, its folder, and the settings typed over it."""

    text: str
    folder: Path
    sets: tuple[str, ...]
    section: TuneSection

    def settled(self, values: Values, *, folder: Path) -> Config:
        """A combination's whole-length run in `folder`, which exists and has not begun, with nothing left open.

        Raises ConfigError.
        """
        chosen = [f"{key}={literal(value)}" for key, value in values.items()]
        config = resolve(self.text, sets=[*self.sets, *chosen]).config.for_others()
        config = config.model_copy(update={"engine": LocalEngine()})
        return decide(_seen_from(folder, config, base=self.folder), RunDir(folder))[0]

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


def make_trial(job: Job, base: Base, *, folder: Path, below: RunDir | None = None) -> RunDir:
    """A job's run directory with its run file, unless it is there. `below`: the trial's run at the rung before.

    Loads the task. Raises ConfigError, DataError, TaskError, ResourceError.
    """
    run = RunDir(folder)
    if run.run_file.exists():
        return run
    make_private(folder.parent)
    make_private(folder)
    config = base.settled(job.values, folder=folder)
    length = rung_lengths(config, base.section, num_steps=length_of(config, folder).num_steps)[job.rung]
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"steps": length.steps, "tokens": 0, "epochs": 0.0}),
            "schedule": config.schedule.model_copy(update={"warmup": length.warmup}),
            "checkpoint": config.checkpoint.model_copy(
                update={"keep_steps": [length.keep_step] if length.keep_step else []}
            ),
        }
    )
    if below is not None:
        _take_over(below, run)
    write_atomic(run.run_file, to_toml(config), private=True)
    return run


def length_of(config: Config, folder: Path) -> "Length":
    """The length of a run with nothing left open. Raises DataError, TaskError."""
    from cuadrilla.train.setup import make_task, measure_length

    return measure_length(config, make_task(config, folder))


def settings_of(run: RunDir) -> Config:
    """The settings in a run's file."""
    return resolve(run.run_file.read_text(encoding="utf-8")).config


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


def _take_over(before: RunDir, run: RunDir) -> None:
    """The checkpoint from which a longer run goes on, and the rows up to there; nothing if none was kept."""
    kept = kept_step(before)
    checkpoint = before.checkpoints / f"v{kept:08d}"
    if not kept or not checkpoint.is_dir():
        return
    with storage_errors(run.checkpoints):
        make_private(run.checkpoints)
        shutil.copytree(checkpoint, run.checkpoints / checkpoint.name, dirs_exist_ok=True)
    rows = [row for row in read_jsonl(before.metrics) if isinstance(at := row.get("version"), int) and at <= kept]
    write_atomic(run.metrics, "".join(f"{json.dumps(row)}\n" for row in rows), private=True)


def kept_step(run: RunDir) -> int:
    """The step from which a longer run can go on; 0: none."""
    return max(settings_of(run).checkpoint.keep_steps, default=0)


def discard_weights(run: RunDir, *, all_of_them: bool) -> None:
    """Free the disk of a run that is finished: all its checkpoints, or all but the one that a longer run needs."""
    there = list(run.checkpoints.glob("v*"))
    if not all_of_them and len(there) < 2:
        return
    needed = "" if all_of_them else f"v{kept_step(run):08d}"
    for path in there:
        if path.name != needed:
            shutil.rmtree(path, ignore_errors=True)
    for folder in (run.journal, run.tensorboard):
        shutil.rmtree(folder, ignore_errors=True)


def read_result(run: RunDir, section: TuneSection, *, from_step: int, seconds: float, place: str) -> TrialResult:
    """The result of a complete run. `from_step`: where this job began, after the steps of a shorter run."""
    rows = last_rows(run.metrics)
    name = section.metric or next((name for name in USUAL_METRICS if any(name in row for row in rows)), "val_loss")
    scores = [float(row[name]) for row in rows if row.get(name) is not None]
    tokens = {row["version"]: row["tokens"] for row in rows if "tokens" in row}
    trained = max(tokens.values(), default=0) - tokens.get(from_step, 0)
    if not scores:
        known = ", ".join(sorted({key for row in rows for key in row}))
        reason = Message("no step has {name}; there are {known}", name=name, known=known)
        return TrialResult(score=None, tokens=trained, seconds=seconds, place=place, reason=reason)
    score = max(scores) if section.maximize else min(scores)
    return TrialResult(score=score, tokens=trained, seconds=seconds, place=place)
