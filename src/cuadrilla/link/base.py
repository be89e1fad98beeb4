"""The `Link` protocol and the messages that travel on it.

A link carries small messages both ways and named tensors beside them. The in-process link passes tensors by
reference, so a receiver copies what it wants to keep. Every implementation delivers messages of one worker in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cuadrilla.errors import LinkError
from cuadrilla.host.usage import Usage
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
TensorRef = object  # an address of a Version's tensors, meaningful to both ends of one link
KICKED = Message("this machine was removed from the crew (`cuadrilla kick` where the coordinator runs)")
NOT_LISTED = Message("this node is not in the crew, or no longer: `cuadrilla kick` removes a node")
COME_AGAIN = "ask there for a new invite, then: cuadrilla join --new"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a worker. `environment`: its program, which must be the coordinator's, and what must match
    only in strict mode: torch build, device kind, threads, ...

    `speed_hint`: how fast it thinks it is beside the others, in any unit; used until it is measured.
    """

    speed_hint: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Heartbeat: `micro_steps` counts everything the worker has finished since it joined.

    `part`: of its lease, so far, from 0 to 1; for who watches.
    """

    micro_steps: int
    part: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The answer to a lease, with the strategy's tensors, which must not change until the next Version.

    `valid` is False when the worker itself found a non-finite or overflowing value.

    `transfer_seconds` to get the version before and to hand over the answer before that: what of a round costs this
    worker as much however few units it has. How long it takes in all, the coordinator sees.
    """

    lease_id: int
    tokens: int
    loss_sum: float
    tensors: Tensors
    transfer_seconds: float = 0.0
    valid: bool = True


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A lease is computed, and its Contribution on the way: the worker can do something else meanwhile."""

    lease_id: int


@dataclass(frozen=True, kw_only=True)
class SaidLine:
    """A line of a worker's log."""

    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """How a worker's machine is, every few seconds, for who watches: nothing of the training depends on it.

    `phase`: one of `PHASES`. `waiting_part`: of the time since the report before. Bytes per second: while tensors
    travelled. `dropped`: how many lines there were beside `lines`. `facts`: what it is, in the first of a session.
    """

    usage: Usage = field(default_factory=Usage)
    phase: str = ""
    waiting_part: float | None = None
    sent_bytes_per_second: float | None = None
    received_bytes_per_second: float | None = None
    round_trip_seconds: float | None = None
    lines: tuple[SaidLine, ...] = ()
    dropped: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)


PHASES = ("loading", "receiving", "computing", "sending", "waiting", "paused")


@dataclass(frozen=True, kw_only=True)
class Goodbye:
    """The worker leaves in order: what it holds goes back."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Version:
    """A committed state: every worker replaces its parameters by `parameters`."""

    version: int
    parameters: TensorRef = None


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Units to compute from `version`. Losses are divided by `planned_tokens`, so that sums stay small in fp16.

    The last `padding` units count nothing: a rank of an island computes them to stay in step with the others.
    """

    lease_id: int
    version: int
    units: tuple[int, ...]
    planned_tokens: int
    padding: int = 0


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run has ended, or the worker is no longer wanted. `again`: it may join anew at once (it was silent)."""

    reason: str
    refused: bool = False
    again: bool = False


@dataclass
class KnownTerm:
    """How many times a crew was promoted to another machine, as far as this one knows: who knows less is an old
    coordinator, that was believed to be gone. `learned` is called with a higher number.
    """

    value: int = 0
    learned: Callable[[int], None] = lambda _term: None

    def meet(self, term: int, *, address: str) -> None:
        """Raises LinkError for a coordinator of an earlier term."""
        if term < self.value:
            raise LinkError(
                "{address} is this crew's old coordinator: another machine was promoted since (term {term}, not"
                " {known})",
                address=address,
                term=term,
                known=self.value,
                hint="stop it there (cuadrilla down); the crew goes on where it was promoted",
            )
        if term > self.value:
            self.value = term
            self.learned(term)


class Refused(LinkError):
    """The coordinator was reached, and this node is not to work for it: trying again does not help."""


class Busy(LinkError):
    """The coordinator was reached, and takes no more calls from here just now."""


class Paused(Busy):
    """The coordinator was reached, and its owner has told this node to wait."""


PAUSED = Message("this node is paused (`cuadrilla unpause` where the coordinator runs)")
LENT = Message("this machine takes part in a run of several machines")


ToCoordinator = Hello | Progress | Computed | Contribution | Goodbye
ToWorker = Version | Lease | Stop


class Link(Protocol):
    """A worker's way to the coordinator. Raises LinkError when the coordinator cannot be reached any more.

    Used by one thread; Contributions and their pieces may come from a second thread, and from no third one.
    """

    def call(self, message: ToCoordinator) -> None:
        """Send a message; returns when the coordinator has it, or will have it: tensors have travelled by then."""

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        """Send some tensors of the answer to a lease ahead: its Contribution holds the others.

        One that comes again begins the answer anew: what came before it does not count.
        """

    def next_event(self) -> ToWorker:
        """Wait for the next message to this worker."""

    def interrupted(self) -> bool:
        """True when a Stop or another lease is waiting: nobody wants what is being computed. Never blocks."""

    def download(self, ref: TensorRef) -> Tensors:
        """The tensors behind a ref from the coordinator."""

    def close(self) -> None:
        """Leave the link; safe to call twice."""
