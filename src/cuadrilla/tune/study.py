"""The search as a study of Optuna in an SQLite file, which optuna-dashboard opens. It decides nothing: `Search` does.

It is made anew from the search at each start, so it cannot fall behind. Where Optuna is not installed there is none.
"""

import importlib.util
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuadrilla.config import TuneSection
from cuadrilla.rundir import storage_errors
from cuadrilla.tune.folder import SearchFolder
from cuadrilla.tune.search import Job, Search, TrialResult

NAME = "cuadrilla"

log = logging.getLogger(__name__)


class Study:
    """Told of each job. `study` None: there is no Optuna."""

    def __init__(self, folder: SearchFolder, section: TuneSection, search: Search) -> None:
        """Raises ResourceError."""
        self._search, self._section = search, section
        self._trials: dict[int, Any] = {}
        self._study: Any = None
        if importlib.util.find_spec("optuna") is None:
            return
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with storage_errors(folder.study):
            folder.study.unlink(missing_ok=True)
        with self._storing():
            self._study = optuna.create_study(
                study_name=NAME,
                storage=_storage(folder.study),
                direction="maximize" if section.maximize else "minimize",
                sampler=optuna.samplers.RandomSampler(),
            )
        for job in search.jobs.values():
            self.began(job)
            if job.key in search.results:
                self.ended(job, search.results[job.key])

    def began(self, job: Job) -> None:
        if self._study is None or job.rung or job.trial in self._trials:
            return
        from cuadrilla.tune.sampler import distribution

        distributions = {key: distribution(self._section.space[key]) for key in job.values}
        with self._storing():
            self._study.enqueue_trial(dict(job.values))
            self._trials[job.trial] = self._study.ask(distributions)

    def ended(self, job: Job, found: TrialResult) -> None:
        if self._study is not None:
            with self._storing():
                self._store(job, found)

    def _store(self, job: Job, found: TrialResult) -> None:
        trial = self._trials[job.trial]
        trial.set_user_attr("run", job.name)
        if found.place:
            trial.set_user_attr("place", found.place)
        if found.score is None:
            trial.set_user_attr("reason", found.reason)
        else:
            trial.report(found.score, step=job.rung)
            if job.rung == 0 and self._section.constraints:
                trial.set_constraint("violation", self._search.violation(found))
        if job.rung == self._search.num_rungs - 1 or found.score is None:
            self._tell(job, found.score)

    def close(self) -> None:
        """The search is over: what did not get to the longest runs was pruned. Safe to call twice."""
        if self._study is None:
            return
        with self._storing():
            for number, trial in self._trials.items():
                rungs = [rung for at, rung in self._search.results if at == number]
                if rungs and max(rungs) < self._search.num_rungs - 1:
                    self._study.tell(trial, state=_state("PRUNED"), skip_if_finished=True)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """A full disk, or somebody who has locked the file for long, is no reason to end the search."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
            told = "the study for optuna-dashboard is not kept any more, until the next start of the search: %s"
            log.warning(told, type(error).__name__)
            self._study = None

    def _tell(self, job: Job, score: float | None) -> None:
        if score is None:
            self._study.tell(self._trials[job.trial], state=_state("FAIL"), skip_if_finished=True)
        else:
            self._study.tell(self._trials[job.trial], score, skip_if_finished=True)


def _storage(path: Path) -> Any:
    """By its path: an address would read a folder's `?` and `#` as parts of its own."""
    from optuna.storages import RDBStorage

    return RDBStorage("sqlite://", engine_kwargs={"creator": lambda: sqlite3.connect(path)})


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]
