"""What can happen to a coordinator (events) and what it wants done (actions). All plain data.

What workers say, and what they are told, are the messages of `link/base.py`; tensors in them are nothing to it.
"""

from dataclasses import dataclass

from cuadrilla.link.base import Contribution, ToCoordinator, ToWorker
from cuadrilla.sync.ledger import Grant


@dataclass(frozen=True, kw_only=True)
class Received:
    """By a worker; a Goodbye also by its transport, for one that died."""

    worker: str
    message: ToCoordinator


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What became of a `Merge`: committed, or refused because of these leases' contributions.

    `confirmed`: units whose first contribution looked wrong, as did the second one, of another worker.
    """

    bad_leases: tuple[int, ...] = ()
    confirmed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    reason: str


@dataclass(frozen=True, kw_only=True)
class Send:
    """To a worker. A Version comes without its parameters; who is sent a Stop is no member any more."""

    worker: str
    message: ToWorker


@dataclass(frozen=True, kw_only=True)
class Late:
    """The lease takes longer than it should: others are given its units, too."""

    worker: str
    lease_id: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a worker said to the lease that it held."""

    grant: Grant
    contribution: Contribution


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Make `version`, so many optimizer steps on, from these answers, in this order; the units of the round are
    `units` less `skipped`.
    """

    version: int
    steps: int
    answers: tuple[Answer, ...]
    units: tuple[int, ...]
    skipped: tuple[int, ...]
    tokens_before: int


@dataclass(frozen=True, kw_only=True)
class Commit:
    merge: Merge
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Discard:
    """This lease's answer is not wanted."""

    lease_id: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The run is over, or stops here: `complete` tells which."""

    reason: str
    complete: bool


Event = Received | Merged | Tick | StopRequested
Action = Send | Late | Merge | Commit | Discard | Finish
