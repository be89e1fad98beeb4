"""How much each setting of a search has decided, by PED-ANOVA (arXiv 2304.10255, with settings that count only at times
arXiv 2601.20800): how far what the best trials have chosen differs from what all trials have chosen. By Optuna.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cuadrilla.config import DimensionSection
from cuadrilla.tune.sampler import Known, distribution

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

FEWEST_TRIALS = 8
BEST_PART = 0.1
FEWEST_BEST = 5
"""Trials that count as the best: Optuna's advice, so that one lucky trial decides nothing."""
MOST_PART = 0.5


def best_part(num_trials: int) -> float:
    """What part of the trials counts as the best."""
    return min(max(BEST_PART, FEWEST_BEST / num_trials), MOST_PART)


def importances(dimensions: Mapping[str, DimensionSection], known: Sequence[Known]) -> dict[str, float]:
    """Of each setting, its part of the whole, the largest first; {} if they have not told the trials apart.

    Raises ImportError where there is no Optuna. Trials that failed, or hold what no dimension allows, do not count.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Optuna calls experimental, and that a setting has few trials
        trials = [trial for each in known if (trial := _trial(dimensions, each)) is not None]
        try:
            found = _divergences(trials) if len(trials) >= FEWEST_TRIALS else {}
        except (ValueError, ArithmeticError):  # a range with which nobody can reckon
            found = {}
    whole = sum(found.values())
    if not whole > 0 or not math.isfinite(whole):
        return {}
    return {key: part / whole for key, part in sorted(found.items(), key=lambda each: -each[1])}


def _divergences(trials: Sequence["FrozenTrial"]) -> dict[str, float]:
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    study.add_trials(trials)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best_part(len(trials)))
    found: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    return found


def _trial(dimensions: Mapping[str, DimensionSection], each: Known) -> "FrozenTrial | None":
    from optuna.trial import create_trial

    values = {key: value for key, value in each.values.items() if key in dimensions}
    if not math.isfinite(each.score):
        return None
    try:
        return create_trial(
            value=each.score,
            params=values,
            distributions={key: distribution(dimensions[key]) for key in values},
        )
    except (ValueError, TypeError, ArithmeticError):
        return None
