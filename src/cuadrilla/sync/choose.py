"""From the section `sync` of a run file to its strategy."""

from cuadrilla.config import ExactSync, WindowsSync
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.strategy import Strategy
from cuadrilla.sync.windows import Windows


def make_strategy(section: ExactSync | WindowsSync) -> Strategy:
    match section:
        case ExactSync(strict=strict):
            return Exact(strict=strict)
        case WindowsSync():
            return Windows(
                steps_per_round=section.steps, bits=section.bits, strict_lanes=section.lanes if section.strict else ()
            )
