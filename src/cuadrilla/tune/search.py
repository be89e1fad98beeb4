"""One search, from its run file to its best trial: a `JobSource` whose jobs are the trials of a study of Optuna.

A search keeps its state only in that study. A trial's values are in it before its run begins, and its result before
anything else happens. So whatever ends this process, the same command resumes: finished trials are in the study, others
in checkpoints. Only which jobs run now is in no file. Use a search within `storing`.
"""

import random
import sqlite3
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.config import TuneSection
from cuadrilla.errors import ConfigError, EnvironmentProblem, ResourceError
from cuadrilla.jobs.executor import Ended
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, RunDir, last_rows, make_private, read_object, typed, write_json
from cuadrilla.runfile import read_run_file, to_toml
from cuadrilla.tune.folder import BEST, TUNE, discard_weights, keep_best, make_trial, read_scores
from cuadrilla.tune.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as StoredTrial

USUAL_TRIALS = 20
STUDY = "search"
SETTINGS, REASON = "settings", "reason"
"""Attributes in the storage: the first one of the study, the other of a trial that has ended."""
FIRST_TRIALS, FIRST_PERCENT = 4, 20
"""No trial is pruned before this many have ended, nor before this percentage of its run."""
BEHIND = Message("worse than the median of the others at the same part of their runs")


def job_of(trial: "FrozenTrial") -> str:
    return f"t{trial.number:04d}"


def score_of(trial: "FrozenTrial") -> float | None:
    """Score of a trial that was trained to its end; None for any other."""
    return trial.value if trial.state.name == "COMPLETE" else None


class Search:
    """`folder`: of the trials. `tell`: called with the score of each run that has ended."""

    def __init__(self, section: TuneSection, *, space: Space, storage: "BaseStorage", folder: Path) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.section, self.folder = section, folder
        self.tell: Callable[[Ended, float | None], None] = lambda _ended, _score: None
        self._space = space
        self._grid = space.grid() if section.sampler == "grid" else []
        usual = len(self._grid) or USUAL_TRIALS
        self.num_trials = min(section.trials or usual, usual) if self._grid else section.trials or usual
        self._running: set[str] = set()
        self._behind: set[str] = set()
        self._looked: dict[str, int] = {}
        """Size of each job's metrics.jsonl when its scores were last compared."""
        self._study = optuna.create_study(
            study_name=STUDY,
            storage=storage,
            pruner=optuna.pruners.MedianPruner(FIRST_TRIALS, FIRST_PERCENT),
            direction="maximize" if section.maximize else "minimize",
            load_if_exists=True,
        )
        for trial in self.trials:
            if not trial.state.is_finished():  # the process may have ended before all its values were chosen
                self._choose(self._stored(trial))

    def require_same(self, settings: str) -> None:
        """Raises ConfigError if the search began with other settings."""
        before = self._study.user_attrs.get(SETTINGS)
        if before is None:
            self._study.set_user_attr(SETTINGS, settings)
        elif before != settings:
            hint = "put the old values back, or move {folder} away to begin anew"
            raise ConfigError("this search began with other settings", hint=hint, folder=typed(self.folder))

    @property
    def trials(self) -> "list[FrozenTrial]":
        """All trials that have begun, in their order."""
        from optuna.trial import TrialState

        return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state != TrialState.WAITING]

    @property
    def ended_trials(self) -> "list[FrozenTrial]":
        return [trial for trial in self.trials if trial.state.is_finished()]

    @property
    def best(self) -> "FrozenTrial | None":
        return next((trial for trial in self.ranked() if score_of(trial) is not None), None)

    def ranked(self) -> "list[FrozenTrial]":
        """Trials that have ended, the best first."""
        sign = -1 if self.section.maximize else 1
        return sorted(self.ended_trials, key=lambda trial: (score_of(trial) is None, sign * (score_of(trial) or 0.0)))

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial that has ended, the best first."""
        rows = [{"run": job_of(trial), "score": score_of(trial), **trial.params} for trial in self.ranked()]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        return [{key: row.get(key) for key in keys} for row in rows]

    def run(self, job: str) -> RunDir:
        return RunDir(self.folder / job)

    def trial(self, job: str) -> "FrozenTrial":
        return next(trial for trial in self.trials if job_of(trial) == job)

    def seconds_left(self) -> float | None:
        """Estimate from the time that ended trials took, the median, since some may have waited for this command to be
        typed again; None before the first has ended."""
        seconds = [trial.duration.total_seconds() for trial in self.ended_trials if trial.duration]
        if not seconds:
            return None
        return (self.num_trials - len(seconds)) * statistics.median(seconds) / max(len(self._running), 1)

    # -- JobSource -----------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return len(self.ended_trials) >= self.num_trials

    def next_job(self, _place: str = "") -> str | None:
        trials = self.trials
        left = [trial for trial in trials if not trial.state.is_finished() and job_of(trial) not in self._running]
        if not left and len(trials) < self.num_trials:
            if self._grid:
                self._study.enqueue_trial(dict(self._grid[len(trials)]), skip_if_exists=True)
            self._choose(self._study.ask())
            left = self.trials[-1:]
        self._running.update(map(job_of, left[:1]))
        return job_of(left[0]) if left else None

    def run_of(self, job: str) -> RunDir:
        make_trial(self.run(job), self._space.config(self.trial(job).params))
        return self.run(job)

    def ended(self, ended: Ended) -> None:
        score = None
        if ended.complete:
            scores = read_scores(self.run(ended.job), self.section.metric)
            score = (max if self.section.maximize else min)(scores.values(), default=None)
            ended = ended if scores else replace(ended, reason=self._without_score(ended.job))
        elif ended.job in self._behind:
            ended = replace(ended, reason=ended.reason or BEHIND)
        if ended.complete or ended.reason:
            self.finish(ended, score=score)
            self.tell(ended, score)
            self._tidy()
        self._running.discard(ended.job)

    def unwanted(self) -> list[str]:
        """Running trials that are behind the others, if `tune.prune` is set."""
        if self.section.prune:
            self._behind |= set(filter(self._is_behind, self._running))
        return sorted(self._behind & self._running)

    def _is_behind(self, job: str) -> bool:
        """Whether a running trial is worse than the median of the others."""
        run = self.run(job)
        size = run.metrics.stat().st_size if run.metrics.exists() else 0
        if size == self._looked.get(job, 0):
            return False
        self._looked[job], num_steps = size, read_object(run.config).get("num_steps")
        if not num_steps:  # a damaged file: this trial is not compared
            return False
        trial = self.trial(job)
        stored = self._stored(trial)
        for step, score in read_scores(run, self.section.metric).items():
            percent = 100 * step // num_steps
            if percent not in trial.intermediate_values:
                stored.report(score, percent)
        return stored.should_prune()

    def finish(self, ended: Ended, *, score: float | None) -> None:
        """Write a trial's result to the storage before returning. A finished run is never lost, nor counted twice."""
        from optuna.trial import TrialState

        stored = self._stored(self.trial(ended.job))
        stored.set_user_attr(REASON, ended.reason)
        failed = TrialState.PRUNED if ended.job in self._behind else TrialState.FAIL
        self._study.tell(stored, score, state=failed if score is None else TrialState.COMPLETE)

    def _tidy(self) -> None:
        """Keep the weights of the best trial only, and its run file as the run `best`."""
        best = self.best
        for trial in self.ended_trials:
            if best is None or trial.number != best.number:
                discard_weights(self.run(job_of(trial)))
        if best is not None:
            keep_best(self.run(job_of(best)), self.run(BEST))

    def _without_score(self, job: str) -> Message:
        known = ", ".join(sorted({key for row in last_rows(self.run(job).metrics) for key in row}))
        return Message("no step has {name}; there are {known}", name=self.section.metric or "val_loss", known=known)

    # -- the study -----------------------------------------------------------------------------------------------------

    def _stored(self, trial: "FrozenTrial") -> "StoredTrial":
        from optuna.trial import Trial as StoredTrial

        return StoredTrial(self._study, trial._trial_id)

    def _choose(self, stored: "StoredTrial") -> None:
        self._study.sampler = self._sampler(stored.number)
        self._space.suggest(stored)

    def _sampler(self, number: int) -> "BaseSampler":
        """A sampler for one trial, so that a search that was interrupted draws the same values as one that was not."""
        from optuna.samplers import RandomSampler, TPESampler

        seed = random.Random(f"{self.section.seed}/{number}").getrandbits(32)
        return TPESampler(seed=seed, constant_liar=True) if self.section.sampler == "tpe" else RandomSampler(seed=seed)


def open_storage(path: Path) -> "BaseStorage":
    """Optuna's storage in an SQLite file. It is opened by path, as `?` and `#` have a meaning in a URL."""
    from optuna.storages import RDBStorage

    return RDBStorage("sqlite://", engine_kwargs={"creator": lambda: sqlite3.connect(path, timeout=30.0)})


@contextmanager
def storing() -> Iterator[None]:
    """Context for work with a study. Raises ResourceError for a full disk, a damaged file or one that another program
    has locked for long, and EnvironmentProblem without Optuna."""
    try:
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise EnvironmentProblem("a search needs Optuna", hint="pip install 'cuadrilla[tune]'") from None
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        raise ResourceError(
            "the study of the search cannot be read or written: {reason}",
            reason=error.__cause__ or error,
            hint="free some space, or move the folder tune away to begin anew",
        ) from error


@contextmanager
def open_search(run_file: Path, *, sets: Sequence[str]) -> Iterator[Search]:
    """Open the search of a run file, in `tune/` beside it, under its lock. A search that has begun goes on.

    Raises ConfigError for a space that cannot be searched, or a search that began with other settings, DataError or
    TaskError where no trial could begin, and EnvironmentProblem.
    """
    from cuadrilla.train.setup import make_task

    config = read_run_file(run_file, sets=sets).config
    text = run_file.read_text(encoding="utf-8-sig")
    space = Space(config.tune, text=text, sets=sets)
    folder = RunDir(run_file.parent.resolve() / TUNE)
    make_private(folder.path)
    with FolderLock(folder.lock), storing():
        make_task(config, folder.path.parent)
        storage = open_storage(folder.path / "study.db")
        search = Search(config.tune, space=space, storage=storage, folder=folder.path)
        same = config.model_copy(update={"tune": config.tune.model_copy(update={"trials": 0})})
        search.require_same(to_toml(same))
        write_json(folder.status, {"state": "running"}, private=True)
        try:
            yield search
        finally:
            write_json(folder.status, {"state": "complete" if search.is_done else "stopped"}, private=True)
