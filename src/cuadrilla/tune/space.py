"""The settings of a search: each has a key of the run file, and a range of numbers or a list of values.

A combination has a value for each setting that its run has. If the search also chooses `optim.kind`, runs with adamw
have no `optim.momentum`. So kinds are chosen first. Pure.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cuadrilla.config import DimensionSection, Scalar, TuneSection
from cuadrilla.errors import ConfigError
from cuadrilla.runfile import as_sets, dump, leaves, resolve

if TYPE_CHECKING:
    from optuna.trial import Trial

Values = dict[str, Scalar]
"""Chosen values by section.key."""

NOT_SEARCHED = ("tune.", "engine.", "alarm.", "checkpoint.", "schema", "task.kind", "sync.")
MAX_COMBINATIONS = 10_000


class Space:
    """The settings to choose, kinds first. `text`: the run file. `sets`: settings typed over it."""

    def __init__(self, section: TuneSection, *, text: str, sets: Sequence[str] = ()) -> None:
        """Tries the values of each list, and both ends of each range, on the run file. Raises ConfigError, with the key
        and what to write instead."""
        if not section.space:
            raise ConfigError(
                "tune.space is empty: there is nothing to choose",
                hint="for example, below [tune.space]: {example}",
                example="optim.lr = {low = 0.002, high = 0.2, log = true}",
            )
        for key in section.space:
            if key.startswith(NOT_SEARCHED):
                hint = "choose settings of run, data, model, train, optim, schedule, sample or guard"
                raise ConfigError("tune.space.{key}: this is not what a search chooses", key=key, hint=hint)
        self._text, self._sets = text, sets
        self.dimensions = dict(sorted(section.space.items(), key=lambda named: not _is_kind(named[0])))
        kinds = [[(key, value) for value in each.choices] for key, each in self.dimensions.items() if _is_kind(key)]
        self._keys = {
            chosen: leaves(dump(resolve(text, sets=[*sets, *as_sets(dict(chosen))]).config)).keys()
            for chosen in itertools.product(*kinds)
        }
        """Keys of the settings that a run has, by the chosen kinds."""
        for key, dimension in self.dimensions.items():
            self._try(key, dimension)

    def suggest(self, trial: "Trial") -> None:
        """Have a trial of Optuna choose a value for each setting that its run has."""
        chosen: Values = {}
        for key, dimension in self.dimensions.items():
            if self._counts(key, chosen):
                chosen[key] = _suggested(trial, key, dimension)

    def grid(self) -> list[Values]:
        """All combinations. Raises ConfigError where a range has no step, and where there are too many."""
        found: list[Values] = [{}]
        for key, dimension in self.dimensions.items():
            points = _points(key, dimension)
            found = [
                {**chosen, **extra}
                for chosen in found
                for extra in ([{key: point} for point in points] if self._counts(key, chosen) else [{}])
            ]
            if len(found) > MAX_COMBINATIONS:
                hint = 'larger steps, or sampler = "random"'
                raise ConfigError("the grid has more than {most:,} combinations", most=MAX_COMBINATIONS, hint=hint)
        return found

    def _counts(self, key: str, chosen: Mapping[str, Scalar]) -> bool:
        kinds = tuple((other, value) for other, value in chosen.items() if _is_kind(other))
        return _is_kind(key) or key in self._keys[kinds]

    def _try(self, key: str, dimension: DimensionSection) -> None:
        chosen = next((dict(kinds) for kinds, keys in self._keys.items() if key in keys), {})
        values: Sequence[Scalar] = dimension.choices or _ends(dimension)
        for value in values:
            try:
                resolve(self._text, sets=[*self._sets, *as_sets({**chosen, key: value})])
            except ConfigError as error:
                raise ConfigError(
                    "tune.space.{key}: {value!r} cannot be tried: {reason}",
                    key=key,
                    value=value,
                    reason=error.message,
                    hint=error.hint,
                ) from None


def _is_kind(key: str) -> bool:
    return key.endswith(".kind")


def _ends(dimension: DimensionSection) -> tuple[int | float, int | float]:
    assert dimension.low is not None
    assert dimension.high is not None
    return dimension.low, dimension.high


def _suggested(trial: "Trial", key: str, dimension: DimensionSection) -> Scalar:
    if dimension.choices:
        found: Scalar = trial.suggest_categorical(key, dimension.choices)  # type: ignore[assignment]
        return found
    (low, high), log = _ends(dimension), dimension.log
    if dimension.is_whole:
        return trial.suggest_int(key, int(low), int(high), log=log, step=int(dimension.step or 1))
    return trial.suggest_float(key, low, high, log=log, step=dimension.step or None)


def _points(key: str, dimension: DimensionSection) -> Sequence[Scalar]:
    if dimension.choices:
        return dimension.choices
    (low, high), step = _ends(dimension), dimension.step or (1 if dimension.is_whole else 0)
    if dimension.log or not step:
        hint = 'add a step, or sampler = "random"'
        raise ConfigError("tune.space.{key}: a grid needs choices, or a step", key=key, hint=hint)
    points = [low + number * step for number in range(min(round((high - low) / step), MAX_COMBINATIONS) + 1)]
    return [int(point) if dimension.is_whole else float(f"{point:.12g}") for point in points]
