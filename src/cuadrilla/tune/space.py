"""The settings of a search: each has a key of the run file, and a range of numbers or a list of values.

A combination has a value for each setting that its run has. If the search also chooses `optim.kind`, runs with adamw
have no `optim.momentum`. So the kind is chosen first. Pure.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cuadrilla.config import Config, DimensionSection, Scalar, TuneSection
from cuadrilla.errors import ConfigError
from cuadrilla.runfile import as_sets, dump, leaves, resolve

if TYPE_CHECKING:
    from optuna.trial import Trial

Values = dict[str, Scalar]
"""Chosen values by section.key."""

KIND = "optim.kind"
NOT_SEARCHED = ("tune.", "engine.", "alarm.", "checkpoint.", "schema", "task.kind", "sync.")
MAX_COMBINATIONS = 10_000


class Space:
    """The settings to choose, the kind first. `text`: the run file. `sets`: settings typed over it."""

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
        self.dimensions = dict(sorted(section.space.items(), key=lambda named: named[0] != KIND))
        self._kinds: list[Values] = [{}]
        if KIND in self.dimensions:
            self._kinds = [{KIND: kind} for kind in self.dimensions[KIND].choices]
        for key in self.dimensions:
            self._try(key, next((kind for kind in self._kinds if key in self._keys(kind)), {}))

    def config(self, values: Values) -> Config:
        """The run file with these values. Raises ConfigError."""
        return resolve(self._text, sets=[*self._sets, *as_sets(values)]).config

    def suggest(self, trial: "Trial") -> None:
        """Have a trial of Optuna choose a value for each setting that its run has."""
        kind = {KIND: _suggested(trial, KIND, self.dimensions[KIND])} if KIND in self.dimensions else {}
        for key in self._keys(kind):
            _suggested(trial, key, self.dimensions[key])

    def grid(self) -> list[Values]:
        """All combinations. Raises ConfigError where a range has no step, and where there are too many."""
        points = {key: _points(key, dimension) for key, dimension in self.dimensions.items()}
        found = [
            kind | dict(zip(keys, chosen, strict=True))
            for kind in self._kinds
            for keys in [self._keys(kind)]
            for chosen in itertools.islice(itertools.product(*(points[key] for key in keys)), MAX_COMBINATIONS + 1)
        ]
        if len(found) > MAX_COMBINATIONS:
            hint = 'larger steps, or sampler = "random"'
            raise ConfigError("the grid has more than {most:,} combinations", most=MAX_COMBINATIONS, hint=hint)
        return found

    def _keys(self, kind: Values) -> list[str]:
        """The settings that are chosen behind the kind: those that a run of this kind has."""
        run = leaves(dump(self.config(kind)))
        return [key for key in self.dimensions if key in run and key != KIND]

    def _try(self, key: str, kind: Values) -> None:
        dimension = self.dimensions[key]
        values: Sequence[Scalar] = dimension.choices or _ends(dimension)
        for value in values:
            try:
                self.config({**kind, key: value})
            except ConfigError as error:
                raise ConfigError(
                    "tune.space.{key}: {value!r} cannot be tried: {reason}",
                    key=key,
                    value=value,
                    reason=error.message,
                    hint=error.hint,
                ) from None


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
