"""The decisions of a search: which trial is next, which is stopped early, which was the best.

A search keeps its state only in Optuna's study. A trial's values are in it before its run begins, and its result before
anything else happens, so a search resumes from its storage. Only which jobs run now is in no file.
"""

import random
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cuadrilla.config import TuneSection
from cuadrilla.errors import ConfigError, EnvironmentProblem, ResourceError
from cuadrilla.jobs.executor import Ended
from cuadrilla.tune.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as StoredTrial

USUAL_TRIALS = 20
STUDY = "search"
SETTINGS, SECONDS, PLACE, REASON = "settings", "seconds", "place", "reason"
"""Attributes in the storage: the first one of the study, the others of a trial."""
FIRST_TRIALS, FIRST_PERCENT = 4, 20
"""No trial is pruned before this many have ended, nor before this percentage of its run."""


def job_of(trial: "FrozenTrial") -> str:
    return f"t{trial.number:04d}"


class Search:
    """A search over a study of Optuna in `storage`. Use it within `storing`."""

    def __init__(self, section: TuneSection, *, space: Space, storage: "BaseStorage") -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.section, self._space = section, space
        self._grid = space.grid() if section.sampler == "grid" else []
        usual = len(self._grid) or USUAL_TRIALS
        self.num_trials = min(section.trials or usual, usual) if self._grid else section.trials or usual
        self._running: set[int] = set()
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

    def require_same(self, settings: str, *, folder: str) -> None:
        """Raises ConfigError if the search began with other settings."""
        before = self._study.user_attrs.get(SETTINGS)
        if before is None:
            self._study.set_user_attr(SETTINGS, settings)
        elif before != settings:
            hint = "put the old values back, or move {folder} away to begin anew"
            raise ConfigError("this search began with other settings", hint=hint, folder=folder)

    @property
    def trials(self) -> "list[FrozenTrial]":
        """All trials that have begun, in their order."""
        from optuna.trial import TrialState

        return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state != TrialState.WAITING]

    @property
    def ended(self) -> "list[FrozenTrial]":
        return [trial for trial in self.trials if trial.state.is_finished()]

    @property
    def has_tried_all(self) -> bool:
        return len(self.ended) >= self.num_trials

    @property
    def best(self) -> "FrozenTrial | None":
        return next((trial for trial in self.ranked() if score_of(trial) is not None), None)

    def ranked(self) -> "list[FrozenTrial]":
        """Trials that have ended, the best first."""

        def rank(trial: "FrozenTrial") -> tuple[bool, float, int]:
            score = score_of(trial)
            return score is None, (-1 if self.section.maximize else 1) * (score or 0.0), trial.number

        return sorted(self.ended, key=rank)

    def trial(self, job: str) -> "FrozenTrial":
        return next(trial for trial in self.trials if job_of(trial) == job)

    def next_job(self) -> str | None:
        """The trial that a free place should train now; None if there is none. It counts as running from then on."""
        trials = self.trials
        left = [trial for trial in trials if not trial.state.is_finished() and trial.number not in self._running]
        if not left and len(trials) < self.num_trials:
            if self._grid:
                self._study.enqueue_trial(dict(self._grid[len(trials)]), skip_if_exists=True)
            self._choose(self._study.ask())
            left = self.trials[-1:]
        if not left:
            return None
        self._running.add(left[0].number)
        return job_of(left[0])

    def give_back(self, job: str) -> None:
        """Let another place go on with a trial."""
        self._running.discard(self.trial(job).number)

    def is_behind(self, job: str, scores: Mapping[int, float]) -> bool:
        """Whether a running trial is worse than the median of the others. `scores`: its scores, by percentage of its
        run."""
        trial = self.trial(job)
        stored = self._stored(trial)
        for percent, score in scores.items():
            if percent not in trial.intermediate_values:
                stored.report(score, percent)
        return stored.should_prune()

    def finish(self, ended: Ended, *, score: float | None, pruned: bool = False) -> None:
        """Write a trial's result to the storage before returning. A finished run is never lost, nor counted twice."""
        from optuna.trial import TrialState

        trial = self.trial(ended.job)
        self._running.discard(trial.number)
        stored = self._stored(trial)
        for key, value in ((SECONDS, ended.seconds), (PLACE, ended.place), (REASON, ended.reason)):
            stored.set_user_attr(key, value)
        failed = TrialState.PRUNED if pruned else TrialState.FAIL
        self._study.tell(stored, score, state=failed if score is None else TrialState.COMPLETE)

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


def score_of(trial: "FrozenTrial") -> float | None:
    """Score of a trial that was trained to its end; None for any other."""
    return trial.value if trial.state.name == "COMPLETE" else None


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
