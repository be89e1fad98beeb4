"""The merge half of every strategy: the answers of a round become one update of the model of record.

    reduce:   of gradients g, squares q, changes Δ and states s of all answers, in their order:
              g = Σ g · planned / Σ tokens;  q = Σ q · (planned / Σ tokens)²;  Δ and s = means weighted by tokens
    step:     θ += Δ;  s becomes the optimizer's state;  then the round's optimizer steps with g (and q) at lr(step)
    version:  the weights θ, with running statistics, or before a window with the optimizer's state

The names of tensors say what they are. In an exact round each parameter has a gradient and no square: one step, clipped
by the global norm. In a window the adaptive parameters have both (`windows.py` says why), and all others a change. So
one kind of round can follow another: their state of record is the same.

Strict gradients are int64 fixed point until they are added. No tensor of an only answer is copied: with one worker in
this process it is the `.grad` that its passes have filled.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cuadrilla.link.base import Contribution, Tensors
from cuadrilla.sync.compact import expanded, names_of
from cuadrilla.sync.events import Answer
from cuadrilla.sync.exact import FIXED_POINT_SCALE, as_double, device_of_double
from cuadrilla.sync.statistics import RunningStatistics
from cuadrilla.sync.strategy import GRADIENT, SQUARE, SQUARES, STATE, Recipe, trainable
from cuadrilla.sync.windows import state_in, window_version

OUTLIER_RATIO = 100.0
"""An outlier has a norm of more than this many times the median of the others. Norms of honest contributions differ
by much less, however few tokens one of them holds."""


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The update of a round, as named tensors, with its global norm. `bad`: indices of the unusable answers."""

    update: Tensors
    norm: float
    bad: tuple[int, ...] = ()


class Merger:
    """The merge half. It owns the optimizer, and its model is the model of record. Between `reduce` and `step` the
    journal stores the update.

    `windows_from`: rounds of at least this many steps are windows, shorter ones are exact. `bits`: of most numbers of a
    window on the wire.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, *, windows_from: int = 2, bits: int = 8) -> None:
        self._params, self._recipe = trainable(model), recipe
        self._windows_from, self._bits = windows_from, bits
        self._statistics = RunningStatistics(model)
        self.optimizer = recipe.make_optimizer(self._params)

    def version(self, *, steps: int) -> Mapping[str, Tensor]:
        """The tensors that are sent as the version before a round of `steps` steps. Tensors that need no other form for
        the wire are those of record themselves, not copies.
        """
        if steps < self._windows_from:
            return {**self._params, **self._statistics.record}
        return window_version(self._params, self.optimizer, bits=self._bits)

    # -- answers become an update --------------------------------------------------------------------------------------

    def is_plausible(self, tensors: Tensors, *, num_units: int, steps: int, whole: bool) -> bool:
        """Whether a contribution to a round of `steps` steps is of the round's kind, and only a `whole` one has the
        form of a whole window; no square is negative (its root would be NaN on all workers for the rest of the run);
        and `num_units` units can have these running statistics, which stay in the model.
        """
        in_window = any(not name.startswith(GRADIENT) for name in tensors.keys() - self._statistics.record.keys())
        claims_whole = any(GRADIENT + name not in tensors for name in self.optimizer.adaptive)
        squares = (expanded(tensors, name) for name in tensors if name.startswith(SQUARES))
        return (
            in_window == (steps >= self._windows_from)
            and (whole or not claims_whole)
            and all(bool((square >= 0).all()) for square in squares)
            and self._statistics.can_be(tensors, num_units=num_units)
        )

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> Reduced:
        """Merge contributions to an update, without changing the weights."""
        said = [answer.contribution for answer in answers]
        names = [name for name in names_of(said[0].tensors) if name not in self._statistics.record]
        update = {name: self._merged(name, said, planned_tokens=planned_tokens) for name in names}
        directions = self._direction_names(update)
        norm = _norm([update[name] for name in directions])
        rest = _norm([update[name] for name in update.keys() - set(directions)])
        norm = norm if math.isfinite(rest) else rest
        update |= self._statistics.means([each.tensors for each in said])
        return Reduced(update=update, norm=norm, bad=() if math.isfinite(norm) else self._unusable(answers))

    def _merged(self, name: str, said: Sequence[Contribution], *, planned_tokens: int) -> Tensor:
        """The sum of gradients or squares, scaled to the planned tokens; of anything else the mean by tokens."""
        tokens = sum(each.tokens for each in said)
        if not name.startswith((GRADIENT, SQUARE)):
            mean = self._sum(name, said, weights=[each.tokens / tokens for each in said])
            return mean.round_() if name.startswith(f"{STATE}step.") else mean  # equal integers
        total = self._sum(name, said, weights=[1] * len(said))
        if tokens != planned_tokens:
            total.mul_((planned_tokens / tokens) ** (2 if name.startswith(SQUARE) else 1))
        return total

    def _sum(self, name: str, said: Sequence[Contribution], *, weights: Sequence[float]) -> Tensor:
        """The weighted sum, in the order of `said`. An only contribution has the weight 1."""
        is_fixed_point = said[0].tensors[name].dtype == torch.int64
        device = device_of_double(self._device) if is_fixed_point else self._device
        parts = (expanded(each.tensors, name).to(device) for each in said)
        total = next(parts)
        if len(said) > 1:
            total = total * weights[0]  # a contribution stays as it is: the merge may have to be repeated
        for weight, part in zip(weights[1:], parts, strict=True):
            total.add_(part, alpha=weight)
        if is_fixed_point:
            total = total.double().div_(FIXED_POINT_SCALE).to(self._params[name.removeprefix(GRADIENT)])
        return total

    def norms(self, answers: Sequence[Answer]) -> list[float]:
        """The norm of each contribution's changes and gradients, comparable between them: a gradient is scaled as if it
        had all tokens. 0 for a contribution without tokens.
        """
        total = sum(answer.contribution.tokens for answer in answers)
        return [self._norm_of(answer.contribution, total=total) for answer in answers]

    def _norm_of(self, said: Contribution, *, total: int) -> float:
        if not said.tokens:
            return 0.0
        names = self._direction_names(said.tensors)
        scales = {name: total / said.tokens if name.startswith(GRADIENT) else 1.0 for name in names}
        return _norm([as_double(expanded(said.tensors, name)) * scales[name] for name in names])

    def _unusable(self, answers: Sequence[Answer]) -> tuple[int, ...]:
        """Indices of the contributions that made the update's norm non-finite."""
        bad = tuple(i for i, answer in enumerate(answers) if not _all_finite(answer.contribution))
        return bad or outliers(self.norms(answers)) or tuple(range(len(answers)))

    def _direction_names(self, tensors: Tensors) -> list[str]:
        """For each parameter the name of its gradient, or of its change if `tensors` hold no gradient of it."""
        return [GRADIENT + name if GRADIENT + name in tensors else name for name in self._params]

    @property
    def _device(self) -> torch.device:
        return next(iter(self._params.values())).device

    # -- an update becomes the next version ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, update: Tensors, *, norm: float, version: int, steps: int) -> float:
        """Apply an update: `steps` optimizer steps up to `version`. Returns the last step's `lr_factor`."""
        update = {name: tensor.to(self._device) for name, tensor in update.items()}
        for name, parameter in self._params.items():
            if name in update:
                parameter.add_(update[name])
            gradient = update.get(GRADIENT + name)
            parameter.grad = None if gradient is None else gradient.to(parameter)
        if state := state_in(update):
            self.optimizer.load_state_tensors({**self.optimizer.state_tensors(), **state})
        squares = {name.removeprefix(SQUARE): tensor for name, tensor in update.items() if name.startswith(SQUARE)}
        self._optimize(squares, norm=norm, steps=range(version - steps + 1, version + 1))
        self._statistics.step(update)
        return self._recipe.lr_factor(version)

    def _optimize(self, squares: Mapping[str, Tensor], *, norm: float, steps: range) -> None:
        """Take these optimizer steps with the gradients, if there are any."""
        gradients = [parameter.grad for parameter in self._params.values() if parameter.grad is not None]
        clip_norm = self._recipe.clip_norm
        if clip_norm and norm > clip_norm and not squares:  # the lanes of a window have clipped their own steps
            for gradient in gradients:
                gradient.mul_(clip_norm / norm)
        for step in steps if gradients else ():
            self.optimizer.step(self._recipe.lr_factor(step), squares=squares or None)
        for parameter in self._params.values():
            parameter.grad = None


def outliers(sizes: Sequence[float]) -> tuple[int, ...]:
    """Indices of contributions whose norm is far above that of the others, most likely because of a flipped bit."""
    found = []
    for index, size in enumerate(sizes):
        others = [other for i, other in enumerate(sizes) if i != index and other > 0]
        if others and size > OUTLIER_RATIO * statistics.median(others):
            found.append(index)
    return tuple(found)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(nn.utils.get_total_norm(tensors))


def _all_finite(contribution: Contribution) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in contribution.tensors.values())
