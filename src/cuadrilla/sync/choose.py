"""From the section `sync` of a run file to its strategy."""

from cuadrilla.config import ExactSync
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.strategy import Strategy


def make_strategy(section: ExactSync) -> Strategy:
    return Exact(strict=section.strict)
