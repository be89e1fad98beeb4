"""From the section `sync` of a run file to its strategy."""

from cuadrilla.config import ExactSync, ServerSync
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.server import Server
from cuadrilla.sync.strategy import Strategy


def make_strategy(section: ExactSync | ServerSync) -> Strategy:
    match section:
        case ExactSync(strict=strict):
            return Exact(strict=strict)
        case ServerSync(staleness=staleness):
            return Server(max_staleness=staleness)
