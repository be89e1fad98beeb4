"""The decisions of a search: which trial is next, which one goes on to a longer run, which was the best.

A trial is a combination of values; a job is a run of it: one, or with rungs one for each rung that it reaches. Each
rung is a study of Optuna and each job a trial of that study. Their storage is all that a search remembers: from the
same storage it goes on where it was.

Jobs are promoted by successive halving (arXiv 1810.05934) in brackets: of trials 0 to `factor` - 1 the best goes on
once all of them have ended, and so on; of `factor` such winners, again the best. Who ends first decides nothing.
"""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.config import TuneSection
from cuadrilla.errors import ConfigError, EnvironmentProblem, ResourceError
from cuadrilla.tune.space import Space, Values

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

USUAL_TRIALS = 20
SETTINGS = "settings"
NOBODY = -1
Key = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of one trial. `rung` 0 is the shortest."""

    trial: int
    rung: int
    values: Values

    @property
    def name(self) -> str:
        return f"t{self.trial:04d}-r{self.rung}"

    @property
    def key(self) -> Key:
        return self.trial, self.rung


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a job. `score`: of the metric; None where there is no usable one, for `reason`. `tokens`: trained
    in this job."""

    score: float | None
    tokens: int = 0
    seconds: float = 0.0
    place: str = ""
    reason: str = ""


class Search:
    """Studies of Optuna in `storage`, one for each rung. Raises ResourceError where it cannot be read or written."""

    def __init__(self, section: TuneSection, *, space: Space, storage: "BaseStorage") -> None:
        self.section, self._space = section, space
        self._grid = space.grid() if section.sampler == "grid" else []
        usual = len(self._grid) or USUAL_TRIALS
        self.num_trials = min(section.trials or usual, len(self._grid) or section.trials or usual)
        self.jobs: dict[Key, Job] = {}
        self.results: dict[Key, TrialResult] = {}
        self._trials: dict[Key, Trial] = {}
        """Of jobs that have not ended."""
        self._running: set[Key] = set()
        with _storing():
            self._studies = [self._open_study(storage, rung) for rung in range(section.rungs)]
            for rung, study in enumerate(self._studies):
                for frozen in study.get_trials(deepcopy=False):
                    self._load(frozen, rung)

    def _open_study(self, storage: "BaseStorage", rung: int) -> "Study":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            study_name=f"rung-{rung}",
            storage=storage,
            direction="maximize" if self.section.maximize else "minimize",
            load_if_exists=True,
        )

    def _load(self, frozen: "FrozenTrial", rung: int) -> None:
        """A trial of the storage as a job; one that was not chosen to its end is."""
        from optuna.trial import Trial, TrialState

        if frozen.state == TrialState.WAITING:
            return
        trial = None if frozen.state.is_finished() else Trial(self._studies[rung], frozen._trial_id)
        if trial is not None and rung == 0:
            self._studies[0].sampler = self._sampler(frozen.number)
            self._space.suggest(trial)
        values = frozen.params if trial is None else trial.params
        job = self._note(Job(trial=frozen.user_attrs.get("trial", frozen.number), rung=rung, values=dict(values)))
        if trial is not None:
            self._trials[job.key] = trial
        else:
            self.results[job.key] = TrialResult(**{"score": frozen.value, **frozen.user_attrs.get("result", {})})

    def _note(self, job: Job) -> Job:
        self.jobs[job.key] = job
        return job

    def require_same(self, wanted: dict[str, Any], *, folder: str) -> None:
        """Raises ConfigError where a search that has begun was another one. `wanted`: the settings that decide its
        results."""
        with _storing():
            before = self._studies[0].user_attrs.get(SETTINGS)
            if before is None:
                self._studies[0].set_user_attr(SETTINGS, wanted)
                return
        if changed := sorted(key for key in wanted.keys() | before.keys() if wanted.get(key) != before.get(key)):
            raise ConfigError(
                "this search began with other settings: {keys}",
                keys=", ".join(changed),
                hint="put the old values back, or move {folder} away to begin anew",
                folder=folder,
            )

    # -- what happens --------------------------------------------------------------------------------------------------

    def next_job(self, *, more: bool = True) -> Job | None:
        """The job that a free place should do; None: nothing now. It counts as running from then on.

        `more` False: only those that were begun.
        """
        waiting = [self.jobs[key] for key in self._trials if key not in self._running]
        job = min(waiting, key=lambda job: (-job.rung, job.trial), default=None)
        if job is None and more:
            with _storing():
                job = self._promotion() or self._new()
        if job is not None:
            self._running.add(job.key)
        return job

    def finish(self, job: Job, found: TrialResult) -> None:
        """In the storage when this returns: a finished trial is never lost, nor counted twice."""
        from optuna.trial import TrialState

        trial = self._trials.pop(job.key)
        self._running.discard(job.key)
        self.results[job.key] = found
        with _storing():
            trial.set_user_attr("result", {key: value for key, value in asdict(found).items() if key != "score"})
            state = TrialState.FAIL if found.score is None else TrialState.COMPLETE
            self._studies[job.rung].tell(trial, found.score, state=state)

    def give_back(self, job: Job) -> None:
        """Somebody else has to go on with it."""
        self._running.discard(job.key)

    # -- how it stands -------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return not self._trials

    @property
    def is_over(self) -> bool:
        """All has been tried."""
        return self._num_begun >= self.num_trials and self.is_idle and self._due() is None

    @property
    def best(self) -> Job | None:
        """The best of the highest rung at which a job has ended."""
        scored = [self.jobs[key] for key, found in self.results.items() if found.score is not None]
        return min(scored, key=self._rank, default=None)

    def num_jobs(self, rung: int) -> int:
        """If all trials are tried."""
        return int(self.num_trials // self.section.factor**rung)

    def ranked(self) -> list[Job]:
        """The finished job of each trial, the longest if there are several; the best first."""
        last = {trial: rung for trial, rung in sorted(self.results)}
        return sorted((self.jobs[key] for key in last.items()), key=self._rank)

    def may_go_on(self, job: Job) -> bool:
        """Whether a longer run may still need the weights of a finished job."""
        above, bracket = job.rung + 1, job.trial // self.section.factor ** (job.rung + 1)
        if above == self.section.rungs or bracket >= self.num_jobs(above) or (job.trial, above) in self.results:
            return False
        return self._winner(job.rung, bracket) in (None, job.trial)

    def _rank(self, job: Job) -> tuple[int, float, int]:
        score = self.results[job.key].score
        if score is None:
            return 1, 0.0, job.trial
        return -job.rung, -score if self.section.maximize else score, job.trial

    @property
    def _num_begun(self) -> int:
        return sum(rung == 0 for _, rung in self.jobs)

    # -- who is next ---------------------------------------------------------------------------------------------------

    def _promotion(self) -> Job | None:
        from optuna.trial import TrialState, create_trial

        due = self._due()
        if due is None:
            return None
        trial, rung = due
        below, study = self._studies[0].get_trials(deepcopy=False)[trial], self._studies[rung]
        attrs = {"trial": trial}
        running = TrialState.RUNNING  # in one piece: whoever reads the storage finds the whole of it
        study.add_trial(
            create_trial(state=running, params=below.params, distributions=below.distributions, user_attrs=attrs)
        )
        self._load(study.get_trials(deepcopy=False)[-1], rung)
        return self.jobs[due]

    def _due(self) -> Key | None:
        """The trial that goes on to a longer run now, and its rung; the longest first."""
        for rung in reversed(range(self.section.rungs - 1)):
            for bracket in range(self.num_jobs(rung + 1)):
                winner = self._winner(rung, bracket)
                if winner is not None and winner != NOBODY and (winner, rung + 1) not in self.jobs:
                    return winner, rung + 1
        return None

    def _winner(self, rung: int, bracket: int) -> int | None:
        """The trial that goes on from a rung; None: that is not decided; NOBODY: all of the bracket have failed."""
        if rung < 0:
            return bracket
        factor = self.section.factor
        members = [self._winner(rung - 1, at) for at in range(bracket * factor, (bracket + 1) * factor)]
        trials = [trial for trial in members if trial is not None and trial != NOBODY]
        if None in members or any((trial, rung) not in self.results for trial in trials):
            return None
        able = [self.jobs[trial, rung] for trial in trials if self.results[trial, rung].score is not None]
        return min(able, key=self._rank).trial if able else NOBODY

    def _new(self) -> Job | None:
        number, study = self._num_begun, self._studies[0]
        if number >= self.num_trials:
            return None
        study.sampler = self._sampler(number)
        if self._grid:
            study.enqueue_trial(dict(self._grid[number]), skip_if_exists=True)
        trial = study.ask()
        self._space.suggest(trial)
        job = self._note(Job(trial=number, rung=0, values=dict(trial.params)))
        self._trials[job.key] = trial
        return job

    def _sampler(self, number: int) -> "BaseSampler":
        """Of its own for each trial, so that a search that goes on draws as if nothing had been."""
        from optuna.samplers import RandomSampler, TPESampler

        seed = random.Random(f"{self.section.seed}/{number}").getrandbits(32)
        return TPESampler(seed=seed, constant_liar=True) if self.section.sampler == "tpe" else RandomSampler(seed=seed)


def open_storage(path: Path) -> "BaseStorage":
    """Optuna's storage in an SQLite file; by its path, as in an address `?` and `#` have a meaning of their own.

    Raises EnvironmentProblem without Optuna, ResourceError.
    """
    try:
        from optuna.storages import RDBStorage
    except ImportError:
        raise EnvironmentProblem("a search needs Optuna", hint="pip install 'cuadrilla[tune]'") from None
    with _storing():
        return RDBStorage("sqlite://", engine_kwargs={"creator": lambda: sqlite3.connect(path, timeout=30.0)})


@contextmanager
def _storing() -> Iterator[None]:
    """A full disk, a damaged file, or a program that has locked it for long. Raises ResourceError."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        raise ResourceError(
            "the study of the search cannot be read or written: {reason}",
            reason=error.__cause__ or error,
            hint="free some space, or move the folder tune away to begin anew",
        ) from error
