"""The decisions of a search: which trial is next, which one goes on to a longer run, which was the best.

A trial is a combination of values; a job is a run of it: one, or with rungs one for each rung that it reaches. Each
rung is a study of Optuna and each job a trial of that study. Their storage is all that a search remembers: from the
same storage it goes on where it was.

Jobs are promoted by successive halving (ASHA, arXiv 1810.05934) with one difference: promotion number k of a rung
looks at the first `factor` × (k + 1) jobs of that rung, all finished, and takes the best that has not gone on. Trial n
depends on its number, the seed and, for tpe, the first rung of the trials up to n − `ahead`. So a search does not
depend on who finishes first, and one that was broken off, or ran on other machines, is the same.
"""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.config import ConstraintSection, TuneSection
from cuadrilla.errors import EnvironmentProblem, ResourceError
from cuadrilla.tune.space import Space, Values

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

USUAL_TRIALS = 20
STARTUP_TRIALS = 10
"""tpe wants that many scores before it believes in anything."""
SECONDS, PARTS = "seconds", "parts"


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
    def key(self) -> tuple[int, int]:
        return self.trial, self.rung


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a job. `score`: of the metric; None where there is no usable one, for `reason`.

    `figures`: those that constraints look at. `tokens`: trained in this job.
    """

    score: float | None
    figures: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    place: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class JobPart:
    """Work on a job that did not end there: where, and for how long."""

    place: str
    seconds: float


class Search:
    """Studies of Optuna in `storage`, one for each rung. `rung_tokens`: of a job at each rung, as planned.

    Raises ResourceError where the storage cannot be read or written.
    """

    def __init__(self, section: TuneSection, *, space: Space, storage: "BaseStorage", rung_tokens: list[int]) -> None:
        self.section, self._space, self._rung_tokens = section, space, rung_tokens
        self._grid = space.grid() if section.sampler == "grid" else []
        usual = len(self._grid) or USUAL_TRIALS
        self.num_trials = min(section.trials or usual, len(self._grid) or section.trials or usual)
        self.results: dict[tuple[int, int], TrialResult] = {}
        self.jobs: dict[tuple[int, int], Job] = {}
        self.named: dict[str, Job] = {}
        self.parts: dict[tuple[int, int], list[JobPart]] = {}
        """The work so far on jobs that are to go on elsewhere."""
        self._trials: dict[tuple[int, int], Trial] = {}
        self._entered: list[list[int]] = [[] for _ in rung_tokens]
        self._running: set[tuple[int, int]] = set()
        with _storing():
            self._studies = [self._open_study(storage, rung) for rung in range(len(rung_tokens))]
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
            sampler=optuna.samplers.RandomSampler(),
            load_if_exists=True,
        )

    def _load(self, frozen: "FrozenTrial", rung: int) -> Job:
        """A trial of the storage as a job."""
        from optuna.trial import Trial

        said = frozen.user_attrs
        job = Job(trial=int(said["trial"]), rung=rung, values=dict(frozen.params))
        self.jobs[job.key] = self.named[job.name] = job
        self._entered[rung].append(job.trial)
        self.parts[job.key] = [JobPart(**part) for part in said.get(PARTS, ())]
        if frozen.state.is_finished():
            kept = {name: said[name] for name in TrialResult.__dataclass_fields__ if name in said}
            self.results[job.key] = TrialResult(score=frozen.value, **kept)
        else:
            self._trials[job.key] = Trial(self._studies[rung], frozen._trial_id)
        return job

    # -- what happens --------------------------------------------------------------------------------------------------

    def next_job(self, *, more: bool = True) -> Job | None:
        """The job that a free place should do; None: nothing now. It counts as running from then on.

        `more` False: only those that were begun.
        """
        job = self._returned() or (self._promotion() or self._new() if more else None)
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
            for name in ("figures", "tokens", SECONDS, "place", "reason"):
                trial.set_user_attr(name, getattr(found, name))
            if self.section.constraints:
                trial.set_constraint("violation", self.violation(found))
            state = TrialState.FAIL if found.score is None else TrialState.COMPLETE
            self._studies[job.rung].tell(trial, found.score, state=state)

    def give_back(self, job: Job, part: JobPart | None = None) -> None:
        """Somebody else has to go on with it. `part`: the work on it so far."""
        self._running.discard(job.key)
        if part is not None:
            parts = self.parts[job.key] = [*self.parts[job.key], part]
            with _storing():
                self._trials[job.key].set_user_attr(PARTS, [vars(each) for each in parts])

    @property
    def spent_seconds(self) -> float:
        """The time of all starts of the search, as noted last."""
        return float(self._studies[0].user_attrs.get(SECONDS, 0.0))

    def note_spent(self, seconds: float) -> None:
        with _storing():
            self._studies[0].set_user_attr(SECONDS, seconds)

    # -- how it stands -------------------------------------------------------------------------------------------------

    @property
    def num_rungs(self) -> int:
        return len(self._studies)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return not self._trials

    @property
    def num_to_come(self) -> int:
        """Jobs that are sure to begin beside those that have."""
        return self.num_trials - len(self._entered[0])

    @property
    def planned_tokens(self) -> int:
        """The tokens of all jobs that have begun."""
        return sum(self._rung_tokens[job.rung] for job in self.jobs.values())

    @property
    def best(self) -> Job | None:
        """The best of the highest rung at which a job has ended with all constraints met."""
        met = [
            self.jobs[key]
            for key, found in self.results.items()
            if found.score is not None and not self.violation(found)
        ]
        return min(met, key=lambda job: (-job.rung, *self._order(job)), default=None)

    @property
    def most_jobs(self) -> int:
        """If all trials are tried."""
        return sum(self.num_trials // self.section.factor**rung for rung in range(self.num_rungs))

    @property
    def whole_tokens(self) -> int:
        """If all trials are tried."""
        return sum(
            self.num_trials // self.section.factor**rung * tokens for rung, tokens in enumerate(self._rung_tokens)
        )

    def job_tokens(self, job: Job) -> int:
        """As planned."""
        return self._rung_tokens[job.rung]

    def ranked(self) -> list[Job]:
        """The finished job of each trial, the longest if there are several; the best first."""
        last = {trial: rung for trial, rung in sorted(self.results)}
        return sorted((self.jobs[key] for key in last.items()), key=self._rank)

    def _rank(self, job: Job) -> tuple[int, float, float, int]:
        if self.results[job.key].score is None:
            return 1, 0.0, 0.0, job.trial
        return -job.rung, *self._order(job)

    def may_go_on(self, job: Job) -> bool:
        """Whether a longer run may still need the weights of a finished job."""
        above = job.rung + 1
        return above < self.num_rungs and (job.trial, above) not in self.results and not self.is_over

    def violation(self, found: TrialResult) -> float:
        return violation(self.section.constraints, found.figures)

    @property
    def is_over(self) -> bool:
        """All has been tried."""
        return len(self._entered[0]) >= self.num_trials and self.is_idle and self._due() is None

    # -- who is next ---------------------------------------------------------------------------------------------------

    def _returned(self) -> Job | None:
        waiting = [self.jobs[key] for key in self._trials if key not in self._running]
        return min(waiting, key=lambda job: (-job.rung, job.trial), default=None)

    def _promotion(self) -> Job | None:
        due = self._due()
        if due is None or not self._may_spend(self._rung_tokens[due[1]]):
            return None
        trial, rung = due
        below = self._studies[0].get_trials(deepcopy=False)[trial]
        return self._add(below.params, below.distributions, trial=trial, rung=rung)

    def _due(self) -> tuple[int, int] | None:
        """The trial that goes on to a longer run now, and its rung; the longest first."""
        for rung in reversed(range(self.num_rungs - 1)):
            entered, gone, made = self._entered[rung], self._entered[rung + 1], 0
            for number in range(self.section.factor, len(entered) + 1, self.section.factor):
                looked_at = entered[:number]
                if any((trial, rung) not in self.results for trial in looked_at):
                    break
                able = [trial for trial in looked_at if trial not in gone[:made] and self._is_usable(trial, rung)]
                if able and made == len(gone):
                    return min(able, key=lambda trial: self._order(self.jobs[trial, rung])), rung + 1
                made += bool(able)
        return None

    def _is_usable(self, trial: int, rung: int) -> bool:
        return self.results[trial, rung].score is not None

    def _new(self) -> Job | None:
        number = len(self._entered[0])
        if number >= self.num_trials or not self._may_spend(self._rung_tokens[0]):
            return None
        num_known = max(0, number - self.section.ahead + 1) if self.section.sampler == "tpe" else 0
        if any((trial, 0) not in self.results for trial in range(num_known)):
            return None
        trial = self._ask(number, self._studies[0].get_trials(deepcopy=False)[:num_known])
        return self._add(trial.params, trial.distributions, trial=number, rung=0)

    def _ask(self, number: int, known: "list[FrozenTrial]") -> "Trial":
        """A combination from the trials `known`, by a study in memory that ends with this question."""
        import optuna
        from optuna.samplers import RandomSampler, TPESampler

        seed = random.Random(f"{self.section.seed}/{number}").getrandbits(32)
        tpe = self.section.sampler == "tpe"
        sampler = TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS) if tpe else RandomSampler(seed=seed)
        study = optuna.create_study(sampler=sampler, direction=self._studies[0].direction)
        study.add_trials(known)
        if self._grid:
            study.enqueue_trial(dict(self._grid[number]))
        trial = study.ask()
        self._space.suggest(trial)
        return trial

    def _add(self, params: Values, distributions: dict[str, Any], *, trial: int, rung: int) -> Job:
        """Into the storage, in one piece."""
        from optuna.trial import TrialState, create_trial

        study = self._studies[rung]
        with _storing():
            study.add_trial(
                create_trial(
                    state=TrialState.RUNNING, params=params, distributions=distributions, user_attrs={"trial": trial}
                )
            )
            return self._load(study.get_trials(deepcopy=False)[-1], rung)

    def _may_spend(self, tokens: int) -> bool:
        return not self.section.tokens or self.planned_tokens + tokens <= self.section.tokens

    def _order(self, job: Job) -> tuple[float, float, int]:
        found = self.results[job.key]
        assert found.score is not None
        return self.violation(found), -found.score if self.section.maximize else found.score, job.trial


def violation(constraints: dict[str, ConstraintSection], figures: dict[str, float]) -> float:
    """The parts of the limits by which they are missed, added up; 0 if all are met. A figure that is not there meets
    none."""
    missed = 0.0
    for name, limit in constraints.items():
        value = figures.get(name)
        if value is None:
            missed += 1.0
            continue
        if limit.at_most is not None and value > limit.at_most:
            missed += (value - limit.at_most) / max(abs(limit.at_most), 1e-12)
        if limit.at_least is not None and value < limit.at_least:
            missed += (limit.at_least - value) / max(abs(limit.at_least), 1e-12)
    return missed


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
