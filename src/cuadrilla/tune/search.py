"""The decisions of a search: which trial is next, which goes on to a longer run, which was the best.

A trial is a combination of values, trained once, or with rungs again and again, longer each time. It is a trial of an
Optuna study, which chooses its values and has the score of its first run; those of longer runs are attributes of the
study. That is all that a search remembers: from the same storage it goes on where it was.

Trials are promoted by successive halving (arXiv 1810.05934) in brackets: of trials 0 to `factor` - 1 the best goes on
once all of them have been trained, and so on; of `factor` such winners, again the best. Who ends first decides nothing.
"""

import random
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.config import TuneSection
from cuadrilla.errors import ConfigError, EnvironmentProblem, ResourceError
from cuadrilla.tune.space import Space, Values

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as StoredTrial

USUAL_TRIALS = 20
STUDY = "search"
SETTINGS, RESULT = "settings", "result"
"""Attributes of the study, and of a trial."""
NOBODY = -1


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a trial's run. `score`: of the metric; None where there is no usable one, for `reason`."""

    score: float | None
    seconds: float = 0.0
    place: str = ""
    reason: str = ""


@dataclass(kw_only=True)
class Trial:
    """`results`: of its runs that have ended, the shortest first."""

    number: int
    values: Values
    results: list[RunResult] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"t{self.number:04d}"

    @property
    def rung(self) -> int:
        """The rung of its next run, or of the one under way."""
        return len(self.results)

    @property
    def score(self) -> float | None:
        return self.results[-1].score if self.results else None


class Search:
    """A study of Optuna in `storage`; to be used under `storing`."""

    def __init__(self, section: TuneSection, *, space: Space, storage: "BaseStorage") -> None:
        self.section, self._space = section, space
        self._grid = space.grid() if section.sampler == "grid" else []
        usual = len(self._grid) or USUAL_TRIALS
        self.num_trials = min(section.trials or usual, len(self._grid) or section.trials or usual)
        self.trials: list[Trial] = []
        self._stored: dict[int, StoredTrial] = {}
        """Trials whose first run has not ended, by number."""
        self._running: set[int] = set()
        self._study = self._open_study(storage)
        longer = self._study.user_attrs
        for frozen in self._study.get_trials(deepcopy=False):
            self._load(frozen, longer)

    def _open_study(self, storage: "BaseStorage") -> "Study":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            study_name=STUDY,
            storage=storage,
            direction="maximize" if self.section.maximize else "minimize",
            load_if_exists=True,
        )

    def _load(self, frozen: "FrozenTrial", longer: Mapping[str, Any]) -> None:
        """A trial of the storage with its `longer` runs; one whose values were not all chosen is chosen to its end."""
        from optuna.trial import Trial as StoredTrial
        from optuna.trial import TrialState

        if frozen.state == TrialState.WAITING:
            return
        values = frozen.params
        if not frozen.state.is_finished():
            stored = self._stored[frozen.number] = StoredTrial(self._study, frozen._trial_id)
            values = self._chosen(stored)
        trial = Trial(number=frozen.number, values=dict(values))
        known = frozen.user_attrs.get(RESULT)
        while known is not None:
            trial.results.append(RunResult(**known))
            known = longer.get(_attribute(trial))
        self.trials.append(trial)

    def require_same(self, wanted: dict[str, Any], *, folder: str) -> None:
        """Raises ConfigError where a search that has begun was another one. `wanted`: the settings that decide its
        results."""
        before = self._study.user_attrs.get(SETTINGS)
        if before is None:
            self._study.set_user_attr(SETTINGS, wanted)
            return
        if changed := sorted(key for key in wanted.keys() | before.keys() if wanted.get(key) != before.get(key)):
            raise ConfigError(
                "this search began with other settings: {keys}",
                keys=", ".join(changed),
                hint="put the old values back, or move {folder} away to begin anew",
                folder=folder,
            )

    # -- what happens --------------------------------------------------------------------------------------------------

    def next_trial(self, *, more: bool = True) -> Trial | None:
        """The trial that a free place should train; None: nothing now. It counts as running from then on.

        `more` False: only those that were begun.
        """
        ready = [trial for trial in self.trials if trial.number not in self._running and self._is_due(trial)]
        found = min(ready, key=lambda trial: (-trial.rung, trial.number), default=None)
        if found is None and more and len(self.trials) < self.num_trials:
            found = self._new()
        if found is not None:
            self._running.add(found.number)
        return found

    def finish(self, trial: Trial, found: RunResult) -> None:
        """In the storage when this returns: a finished run is never lost, nor counted twice."""
        from optuna.trial import TrialState

        self._running.discard(trial.number)
        if stored := self._stored.pop(trial.number, None):
            stored.set_user_attr(RESULT, asdict(found))
            state = TrialState.FAIL if found.score is None else TrialState.COMPLETE
            self._study.tell(stored, found.score, state=state)
        else:
            self._study.set_user_attr(_attribute(trial), asdict(found))
        trial.results.append(found)

    def give_back(self, trial: Trial) -> None:
        """Somebody else has to go on with it."""
        self._running.discard(trial.number)

    def _new(self) -> Trial:
        number = len(self.trials)
        if self._grid:
            self._study.enqueue_trial(dict(self._grid[number]), skip_if_exists=True)
        stored = self._stored[number] = self._study.ask()
        self.trials.append(Trial(number=number, values=self._chosen(stored)))
        return self.trials[-1]

    def _chosen(self, stored: "StoredTrial") -> Values:
        self._study.sampler = self._sampler(stored.number)
        self._space.suggest(stored)
        return dict(stored.params)

    def _sampler(self, number: int) -> "BaseSampler":
        """One for each trial, so that a search that goes on draws as if nothing had been."""
        from optuna.samplers import RandomSampler, TPESampler

        seed = random.Random(f"{self.section.seed}/{number}").getrandbits(32)
        return TPESampler(seed=seed, constant_liar=True) if self.section.sampler == "tpe" else RandomSampler(seed=seed)

    # -- how it stands -------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> list[Trial]:
        return list(filter(self.is_over, self.trials))

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return all(map(self.is_over, self.trials))

    @property
    def has_tried_all(self) -> bool:
        return len(self.trials) >= self.num_trials and self.is_idle

    @property
    def best(self) -> Trial | None:
        """The best of those with the longest run."""
        return next((trial for trial in self.ranked() if trial.score is not None), None)

    def ranked(self) -> list[Trial]:
        """Those of which a run has ended, the best first."""
        return sorted((trial for trial in self.trials if trial.results), key=self._rank)

    def _rank(self, trial: Trial) -> tuple[int, float, int]:
        if trial.score is None:
            return 1, 0.0, trial.number
        return -trial.rung, self._cost(trial.score), trial.number

    def _cost(self, score: float) -> float:
        return -score if self.section.maximize else score

    # -- who goes on ---------------------------------------------------------------------------------------------------

    def num_runs(self, rung: int) -> int:
        """If all trials are tried."""
        return int(self.num_trials // self.section.factor**rung)

    def is_over(self, trial: Trial) -> bool:
        """Whether it has been trained for the last time."""
        return bool(trial.results) and self._winner_over(trial) not in (None, trial.number)

    def _is_due(self, trial: Trial) -> bool:
        return not trial.results or self._winner_over(trial) == trial.number

    def _winner_over(self, trial: Trial) -> int | None:
        """The winner of its bracket at its last rung, as `_winner` has it."""
        bracket = trial.number // self.section.factor**trial.rung
        if trial.score is None or trial.rung == self.section.rungs or bracket >= self.num_runs(trial.rung):
            return NOBODY
        return self._winner(trial.rung, bracket)

    def _winner(self, rung: int, bracket: int) -> int | None:
        """The trial that goes on to a rung; None: that is not decided; NOBODY: all of the bracket have failed."""
        if not rung:
            return bracket
        factor = self.section.factor
        members = [self._winner(rung - 1, at) for at in range(bracket * factor, (bracket + 1) * factor)]
        if None in members or any(member is not None and member >= len(self.trials) for member in members):
            return None
        trials = [self.trials[member] for member in members if member is not None and member != NOBODY]
        if any(trial.rung < rung for trial in trials):
            return None
        scores = {each.number: score for each in trials if (score := each.results[rung - 1].score) is not None}
        return min(scores, key=lambda number: (self._cost(scores[number]), number), default=NOBODY)


def _attribute(trial: Trial) -> str:
    """The study's name for the result of a trial's next run, which is not its first."""
    return f"{trial.name} at rung {trial.rung}"


def open_storage(path: Path) -> "BaseStorage":
    """Optuna's storage in an SQLite file; by its path, as in an address `?` and `#` have a meaning of their own."""
    from optuna.storages import RDBStorage

    return RDBStorage("sqlite://", engine_kwargs={"creator": lambda: sqlite3.connect(path, timeout=30.0)})


@contextmanager
def storing() -> Iterator[None]:
    """A full disk, a damaged file, or a program that has locked it for long. Raises ResourceError, and
    EnvironmentProblem without Optuna."""
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
