"""Which combination a trial tries: all of a grid in turn, by chance, or what earlier trials make promising.

Each sampler gives the same answer for the same trial number, seed and `known` results, and knows nothing else. So a
search goes on after a break as if there had been none, and is the same on one machine and on ten.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuadrilla.config import DimensionSection, TuneSection
from cuadrilla.errors import EnvironmentProblem
from cuadrilla.tune.space import Space, Values, last_value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

USUAL_TRIALS = 20
STARTUP_TRIALS = 10
"""tpe wants that many scores before it believes in anything; until then it draws what "random" would."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A finished trial: what it tried, and what came out (lower is better; infinite: it failed). `violation`: by how
    much it misses the constraints, 0 if it meets them."""

    values: Values
    score: float
    violation: float = 0.0


Suggest = Callable[[int, Sequence[Known]], Values]
"""(number of the trial, what earlier ones gave) to a combination."""


def make_sampler(section: TuneSection, space: Space) -> tuple[Suggest, int]:
    """The sampler, and how many trials there are. Raises ConfigError, EnvironmentProblem (tpe without Optuna)."""
    match section.sampler:
        case "grid":
            combinations = space.grid()
            return (lambda number, _known: combinations[number]), min(
                section.trials or len(combinations), len(combinations)
            )
        case "random":
            return (lambda number, _known: _by_chance(space, number, seed=section.seed)), (
                section.trials or USUAL_TRIALS
            )
        case "tpe":
            require_optuna()
            return (lambda number, known: _by_tpe(space, number, known, seed=section.seed)), (
                section.trials or USUAL_TRIALS
            )


def require_optuna() -> None:
    """Raises EnvironmentProblem."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise EnvironmentProblem(
            'tune.sampler = "tpe" needs Optuna',
            hint="pip install 'cuadrilla[tune]', or --set 'tune.sampler=\"random\"'",
        ) from None


def _by_chance(space: Space, number: int, *, seed: int) -> Values:
    return space.draw(random.Random(f"{seed}/{number}"))


def _by_tpe(space: Space, number: int, known: Sequence[Known], *, seed: int) -> Values:
    """Optuna's TPE with all `known` trials; a study in memory that ends with this question."""
    if sum(each.score < math.inf for each in known) < STARTUP_TRIALS:
        return _by_chance(space, number, seed=seed)
    import optuna
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    chance = random.Random(f"{seed}/{number}")
    sampler = TPESampler(seed=chance.getrandbits(32), n_startup_trials=0)
    study = optuna.create_study(sampler=sampler)
    for each in known:
        failed = each.score == math.inf
        study.add_trial(
            create_trial(
                state=TrialState.FAIL if failed else TrialState.COMPLETE,
                value=None if failed else each.score,
                params=dict(each.values),
                distributions={key: distribution(space.dimensions[key]) for key in each.values},
                constraints={"violation": each.violation},
            )
        )
    trial = study.ask()
    chosen: Values = {}
    for key, dimension in space:
        if space.counts(key, chosen):
            chosen[key] = _suggested(trial, key, dimension)
    return chosen


def _suggested(trial: Any, key: str, dimension: DimensionSection) -> Any:
    if dimension.choices:
        return trial.suggest_categorical(key, dimension.choices)
    step, high = dimension.step or None, last_value(dimension)
    if dimension.is_whole:
        return trial.suggest_int(key, dimension.low, high, log=dimension.log, step=int(step or 1))
    return trial.suggest_float(key, dimension.low, high, log=dimension.log, step=step)


def distribution(dimension: DimensionSection) -> "BaseDistribution":
    """As Optuna describes it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    assert dimension.low is not None
    high = last_value(dimension)  # Optuna warns of a range that its steps do not fill
    if dimension.is_whole:
        return IntDistribution(int(dimension.low), int(high), log=dimension.log, step=int(dimension.step or 1))
    return FloatDistribution(dimension.low, high, log=dimension.log, step=dimension.step or None)
