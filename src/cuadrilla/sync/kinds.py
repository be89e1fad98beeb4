"""The strategies that `sync.kind` names: which worker half, rounds and tensors each has. They share the merge half."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from cuadrilla.config import AutoSync, ExactSync, WindowsSync
from cuadrilla.sync.auto import AutoRounds
from cuadrilla.sync.exact import ExactWorker, exact_forms
from cuadrilla.sync.merge import Merger
from cuadrilla.sync.statistics import statistics_of, with_own_statistics
from cuadrilla.sync.strategy import Forms, Recipe
from cuadrilla.sync.windows import WindowsWorker, window_forms
from cuadrilla.sync.work import Rounds


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """`steps`: optimizer steps of a window. `bits` of most numbers of a window on the wire: 8 or 32. `lanes`: relative
    sizes of the lanes of strict windows.
    """

    kind: Literal["exact", "windows", "auto"]
    strict: bool = False
    steps: int = 1
    bits: int = 8
    lanes: Sequence[float] = ()

    def workers_model(self, model: nn.Module) -> nn.Module:
        """The model of a worker in the coordinator's process. In windows it changes its parameters, so that they are
        copied; exact steps share the tensors of record, except running statistics."""
        if self.kind != "exact":
            return copy.deepcopy(model)
        return with_own_statistics(model) if statistics_of(model) else model

    def worker(self, model: nn.Module, recipe: Recipe) -> ExactWorker:
        """Raises TaskError for a model that this strategy would train wrongly."""
        if self.kind == "exact":
            return ExactWorker(model, strict=self.strict)
        return WindowsWorker(model, recipe, strict=self.strict, bits=self.bits)

    def merge(self, model: nn.Module, recipe: Recipe) -> Merger:
        return Merger(model, recipe, windows_from=1 if self.kind == "windows" else 2, bits=self.bits)

    def rounds(self) -> Rounds:
        if self.kind == "auto":
            return AutoRounds()
        return Rounds(steps=self.steps, lanes=self.lanes)

    def forms(self, model: nn.Module, recipe: Recipe) -> list[Forms]:
        """The forms of its rounds: of exact steps, then of windows."""
        found = list[Forms]()
        if self.kind != "windows":
            found.append(exact_forms(model, strict=self.strict))
        if self.kind != "exact":
            found.append(window_forms(model, recipe, bits=self.bits))
        return found


def exact(*, strict: bool = False) -> Strategy:
    return Strategy(kind="exact", strict=strict)


def windows(*, steps: int, bits: int = 8, lanes: Sequence[float] = ()) -> Strategy:
    """Windows of `steps` steps. With `lanes` they are strict."""
    return Strategy(kind="windows", strict=bool(lanes), steps=steps, bits=bits, lanes=lanes)


def round_bytes(strategy: Strategy, model: nn.Module, recipe: Recipe) -> int:
    """Bytes of a version and a contribution together."""
    form = strategy.forms(model, recipe)[0]
    return sum(tensor.nbytes for tensors in (form.version, form.contributions[0]) for tensor in tensors.values())


def make_strategy(section: ExactSync | WindowsSync | AutoSync, model: nn.Module) -> Strategy:
    """`auto` becomes exact where only exact works: in strict mode, and for models with running statistics."""
    match section:
        case AutoSync(strict=False) if not statistics_of(model):
            return Strategy(kind="auto")
        case ExactSync(strict=strict) | AutoSync(strict=strict):
            return exact(strict=strict)
        case WindowsSync():
            return windows(steps=section.steps, bits=section.bits, lanes=section.lanes if section.strict else ())
