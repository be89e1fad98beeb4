"""The coordinator's inputs (events) and outputs (actions), all plain data.

Messages from and to workers are those of `link/base.py`. The coordinator does not look at tensors in them.
"""

from dataclasses import dataclass

from cuadrilla.link.base import Contribution, ToCoordinator, ToWorker


@dataclass(frozen=True, kw_only=True)
class Received:
    """A message from a worker. The transport sends the Goodbye of a worker that died."""

    worker: str
    message: ToCoordinator


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of a `Merge`: it was committed, or refused because the contributions to `bad_leases` are unusable.

    `confirmed`: units whose contribution looked wrong, and looked the same when another worker computed them again.
    """

    bad_leases: tuple[int, ...] = ()
    confirmed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send a message to a worker. A Version has no parameters yet. A worker that is sent a Stop is not a member."""

    worker: str
    message: ToWorker


@dataclass(frozen=True, kw_only=True)
class Late:
    """A lease takes too long: its units are leased to other workers, too."""

    worker: str
    lease_id: int


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A lease. `at`: when it was granted, by the coordinator's clock."""

    lease_id: int
    worker: str
    units: tuple[int, ...]
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A contribution and the lease that it answers."""

    grant: Grant
    contribution: Contribution


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Make `version` from these answers, in this order; it is `steps` optimizer steps after the one before. `units`:
    all units of the round, with those in `skipped`. `at`: when the round was complete.
    """

    version: int
    steps: int
    answers: tuple[Answer, ...]
    units: tuple[int, ...]
    skipped: tuple[int, ...]
    at: float

    @property
    def tokens(self) -> int:
        return sum(answer.contribution.tokens for answer in self.answers)


@dataclass(frozen=True, kw_only=True)
class Commit:
    merge: Merge


@dataclass(frozen=True, kw_only=True)
class Discard:
    """The answer to this lease is not used."""

    lease_id: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The run is complete."""


Event = Received | Merged | Tick
Action = Send | Late | Merge | Commit | Discard | Finish
