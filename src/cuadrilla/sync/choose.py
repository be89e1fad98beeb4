"""Makes the strategy that the section `sync` of a run file describes."""

from torch import nn

from cuadrilla.config import AutoSync, ExactSync, WindowsSync
from cuadrilla.sync.auto import Auto
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.statistics import statistics_of
from cuadrilla.sync.strategy import Recipe, Strategy
from cuadrilla.sync.windows import Windows


def make_strategy(section: ExactSync | WindowsSync | AutoSync, model: nn.Module, recipe: Recipe) -> Strategy:
    """`auto` becomes exact where only exact works: in strict mode, and for models with running statistics."""
    match section:
        case AutoSync(strict=False) if not statistics_of(model):
            return Auto.of(model, recipe)
        case ExactSync(strict=strict) | AutoSync(strict=strict):
            return Exact(strict=strict)
        case WindowsSync():
            return Windows(steps=section.steps, bits=section.bits, strict_lanes=section.lanes if section.strict else ())
