"""From the section `sync` of a run file to its strategy."""

from cuadrilla.config import AutoSync, ExactSync, WindowsSync
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.strategy import Strategy
from cuadrilla.sync.windows import Windows


def make_strategy(section: ExactSync | WindowsSync | AutoSync) -> Strategy:
    """`auto` is settled when a run begins (`train/measure.py`); what is asked of it before holds for exact steps."""
    match section:
        case ExactSync(strict=strict) | AutoSync(strict=strict):
            return Exact(strict=strict)
        case WindowsSync():
            return Windows(
                steps=section.steps, bits=section.bits, strict_lanes=section.lanes if section.strict else ()
            )
