"""What can happen to a coordinator (events) and what it wants done (actions). All plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cuadrilla.sync.ledger import Grant


@dataclass(frozen=True, kw_only=True)
class Joined:
    worker: str
    speed_hint: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Left:
    """The worker said goodbye, or its door reports that it died."""

    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Heard:
    worker: str
    passes: int


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A contribution has arrived; the caller keeps its tensors until `Merge` or `Discard` names the lease."""

    worker: str
    lease_id: int
    tokens: int
    loss_sum: float
    valid: bool
    transfer_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What became of a `Merge`: committed, or refused because of these leases' contributions.

    `rolled_back`: it was committed with the weights of the last checkpoint. `blameless`: units whose first contribution
    looked wrong and was confirmed by the second.
    """

    bad_leases: tuple[int, ...] = ()
    rolled_back: bool = False
    blameless: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    reason: str


@dataclass(frozen=True, kw_only=True)
class SendVersion:
    worker: str
    version: int


@dataclass(frozen=True, kw_only=True)
class SendLease:
    grant: Grant


@dataclass(frozen=True, kw_only=True)
class Late:
    """The lease takes longer than it should: others are given its units, too."""

    worker: str
    lease_id: int


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Make `version` from these answers, in this order; the units of the round are `units` less `skipped`.

    `staleness`: versions committed since the answer's lease was granted; None where a round waits for everyone.
    """

    version: int
    answers: tuple[Answered, ...]
    units: tuple[int, ...]
    skipped: tuple[int, ...]
    tokens_before: int
    staleness: int | None = None


@dataclass(frozen=True, kw_only=True)
class Commit:
    merge: Merge
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Discard:
    """The tensors of this lease's answer are not wanted."""

    lease_id: int


@dataclass(frozen=True, kw_only=True)
class Evict:
    """The worker is no member any more. `again`: it may join anew (it was only silent)."""

    worker: str
    reason: str
    refused: bool = False
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The run is over, or stops here: `complete` tells which."""

    reason: str
    complete: bool


Event = Joined | Left | Heard | Answered | Merged | Tick | StopRequested
Action = SendVersion | SendLease | Late | Merge | Commit | Discard | Evict | Finish
