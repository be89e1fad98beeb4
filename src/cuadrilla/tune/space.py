"""The settings of a search: each by its key in the run file, as numbers in a range or as a list.

Pure. A combination holds a value for each setting that counts in it: one with `when` counts only where the settings
that it names, chosen or fixed in the run file, have such a value. So a setting comes after those that it depends on.
"""

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cuadrilla.config import Config, DimensionSection, Scalar, TuneSection
from cuadrilla.errors import ConfigError, CuadrillaError
from cuadrilla.messages import Message
from cuadrilla.runfile import dump, leaves, literal, resolve

if TYPE_CHECKING:
    from optuna.trial import Trial

Values = dict[str, Scalar]
"""Chosen values by section.key."""

NOT_SEARCHED = ("tune.", "engine.", "alarm.", "checkpoint.", "schema", "task.kind", "sync.")
LENGTHS = ("train.tokens", "train.epochs", "train.steps")
MAX_COMBINATIONS = 100_000


class Space:
    """The settings to choose, in an order in which each comes after those that its `when` names."""

    def __init__(self, section: TuneSection, config: Config) -> None:
        """Raises ConfigError, with the key and what to write instead, for a space that cannot be searched."""
        if not section.space:
            hint = "for example, below [tune.space]: optim.lr = {{low = 0.002, high = 0.2, log = true}}"
            raise ConfigError("tune.space is empty: there is nothing to choose", hint=hint)
        self._fixed = leaves(dump(config))
        self._kinds = frozenset(key for key in section.space if key.endswith(".kind"))
        for key in section.space:
            _require_possible(key, section)
            self._require_searched(key, rungs=section.rungs)
        self.dimensions = _in_order(section.space)

    def __iter__(self) -> Iterator[tuple[str, DimensionSection]]:
        return iter(self.dimensions.items())

    def counts(self, key: str, chosen: Mapping[str, Scalar]) -> bool:
        """Whether this setting is chosen where those before it are as `chosen`."""
        for other, wanted in self.dimensions[key].when.items():
            if other in self.dimensions and other not in chosen:
                return False
            value = chosen.get(other, self._fixed.get(other))
            if value not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        return True

    def suggest(self, trial: "Trial") -> None:
        """Have a trial of Optuna choose a value for each setting that counts in it."""
        chosen: Values = {}
        for key, dimension in self:
            if self.counts(key, chosen):
                chosen[key] = _suggested(trial, key, dimension)

    def grid(self) -> list[Values]:
        """All combinations. Raises ConfigError where a range has no step, and where there are too many."""
        found: list[Values] = [{}]
        for key, dimension in self:
            points = _points(key, dimension)
            found = [
                {**chosen, **extra}
                for chosen in found
                for extra in ([{key: point} for point in points] if self.counts(key, chosen) else [{}])
            ]
            if len(found) > MAX_COMBINATIONS:
                hint = 'larger steps, or sampler = "random"'
                raise ConfigError("the grid has more than {most:,} combinations", most=MAX_COMBINATIONS, hint=hint)
        return found

    def try_extremes(self, text: str, sets: Sequence[str]) -> None:
        """Whether the run file takes the smallest and the largest of each setting. Raises ConfigError."""
        for key, dimension in self:
            needed = [f"{other}={literal(_one(wanted))}" for other, wanted in dimension.when.items()]
            ends = [each for each in (dimension.low, dimension.high) if each is not None]
            values: Sequence[Scalar] = dimension.choices or ends
            for value in values:
                try:
                    resolve(text, sets=[*sets, *needed, f"{key}={literal(value)}"])
                except CuadrillaError as error:
                    raise ConfigError(
                        "tune.space.{key}: {value!r} cannot be tried: {reason}",
                        key=key,
                        value=value,
                        reason=error.message,
                        hint=_remedy(key, error, dimension),
                    ) from None

    def _require_searched(self, key: str, *, rungs: int) -> None:
        if key.startswith(NOT_SEARCHED):
            hint = "choose settings of run, data, model, train, optim, schedule, sample or guard"
            raise ConfigError("tune.space.{key}: this is not what a search chooses", key=key, hint=hint)
        if key in LENGTHS and rungs > 1:
            hint = "leave out one of the two"
            raise ConfigError("tune.space.{key}: with rungs, the rungs decide the length", key=key, hint=hint)
        if key not in self._fixed and not self._may_appear(key):
            near = difflib.get_close_matches(key, list(self._fixed), n=1, cutoff=0.6)
            raise ConfigError(
                "tune.space.{key}: unknown key",
                key=key,
                hint="did you mean {near}?" if near else "`cuadrilla train --explain-config` lists the keys",
                near=near[0] if near else "",
            )

    def _may_appear(self, key: str) -> bool:
        """A key of another kind of its section, where the kind itself is chosen or said in `when`."""
        return f"{key.partition('.')[0]}.kind" in self._kinds


def _require_possible(key: str, section: TuneSection) -> None:
    """Each `when` can be met by what is searched, or the setting would never be chosen, without a word."""
    for other, wanted in section.space[key].when.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if not values:
            hint = 'such as when = {{"{other}" = ...}}, with one value or a list of them'
            raise ConfigError("tune.space.{key}: `when` names no value of {other}", key=key, other=other, hint=hint)
        searched = section.space.get(other)
        for value in values:
            if searched is not None and not _has(searched, value):
                raise ConfigError(
                    "tune.space.{key}: {other} is never {value!r}",
                    key=key,
                    other=other,
                    value=value,
                    hint="name values that the search gives it",
                )


def _has(dimension: DimensionSection, value: Scalar) -> bool:
    if dimension.choices:
        return value in dimension.choices
    assert dimension.low is not None
    assert dimension.high is not None
    return isinstance(value, int | float) and dimension.low <= value <= dimension.high


def _one(wanted: Scalar | list[Scalar]) -> Scalar:
    return wanted[0] if isinstance(wanted, list) else wanted


def _remedy(key: str, error: CuadrillaError, dimension: DimensionSection) -> str:
    section = key.partition(".")[0]
    if not dimension.when and "unknown key" in error.message:
        return Message('if only one kind has it: when = {{"{section}.kind" = "..."}}', section=section)
    return error.hint


def _in_order(space: Mapping[str, DimensionSection]) -> dict[str, DimensionSection]:
    """Raises ConfigError where settings depend on each other in a circle."""
    ordered: dict[str, DimensionSection] = {}
    rest = dict(space)
    while rest:
        ready = [key for key, dimension in rest.items() if not any(other in rest for other in dimension.when)]
        if not ready:
            keys, hint = ", ".join(rest), "take away one `when`"
            raise ConfigError("tune.space: {keys} depend on each other", keys=keys, hint=hint)
        for key in ready:
            ordered[key] = rest.pop(key)
    return ordered


def _suggested(trial: "Trial", key: str, dimension: DimensionSection) -> Scalar:
    if dimension.choices:
        found = trial.suggest_categorical(key, dimension.choices)
        assert found is not None
        return found
    low, step = dimension.low, dimension.step
    assert low is not None
    high = (
        _at(dimension, _num_steps(dimension) - 1) if step else dimension.high
    )  # Optuna warns of steps that do not fill
    assert high is not None
    if dimension.is_whole:
        return int(trial.suggest_int(key, int(low), int(high), log=dimension.log, step=int(step or 1)))
    return float(trial.suggest_float(key, low, high, log=dimension.log, step=step or None))


def _num_steps(dimension: DimensionSection) -> int:
    """The number of values of a range with a step."""
    assert dimension.low is not None
    assert dimension.high is not None
    return math.floor((dimension.high - dimension.low) / dimension.step + 1e-9) + 1


def _at(dimension: DimensionSection, index: int) -> int | float:
    assert dimension.low is not None
    value = dimension.low + index * dimension.step
    return int(value) if dimension.is_whole else float(f"{value:.12g}")


def _points(key: str, dimension: DimensionSection) -> list[Scalar]:
    if dimension.choices:
        return dimension.choices
    if dimension.step:
        return [_at(dimension, index) for index in range(_num_steps(dimension))]
    if dimension.is_whole and not dimension.log:
        assert dimension.low is not None
        assert dimension.high is not None
        return [*itertools.islice(range(int(dimension.low), int(dimension.high) + 1), MAX_COMBINATIONS + 1)]
    raise ConfigError(
        "tune.space.{key}: a grid needs choices, or a step", key=key, hint='add a step, or sampler = "random"'
    )
