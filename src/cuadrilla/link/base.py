"""The `Link` protocol and the messages that travel on it.

A link carries small messages both ways and named tensors beside them. The in-process link passes tensors by
reference, so a receiver copies what it wants to keep. Every implementation delivers messages of one worker in order.

Between machines a message is JSON (`wire.py`). Its annotations are the bounds that hold for what another machine may
say: they are checked when a message arrives, and not when one is made here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator, Field, PlainSerializer

from cuadrilla.errors import LinkError
from cuadrilla.host.usage import Usage, usage_data
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Mapping[str, Tensor]
else:  # messages need no torch
    Tensors = Mapping[str, Any]

TensorRef = object  # an address of a Version's tensors, meaningful to both ends of one link
KICKED = Message("this machine was removed from the crew (`cuadrilla kick` where the coordinator runs)")
NOT_LISTED = Message("this node is not in the crew, or no longer: `cuadrilla kick` removes a node")
LEAVES = Message("this machine leaves")
COME_AGAIN = "ask there for a new invite, then: cuadrilla join --new"
COORDINATOR = "coordinator"
"""What the coordinator's own machine is called among those of a run: no node may."""
MAX_DEVICES = 8
"""Workers of one node."""
JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""What a job is called on the link, and in file names."""
MAX_NAME = 63
NODE_NAME = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?")

MAX_UNITS = 2**20
MAX_TEXT = 1000
"""Characters of what another machine says: it is printed here, as a part of a line."""
MAX_FACTS = 100
MAX_LINES = 20


def check_node_name(name: str) -> None:
    """Raises LinkError unless `name` can be a node's: names are shown on terminals and used in file names."""
    if not NODE_NAME.fullmatch(name):
        raise LinkError(
            "{name!r} cannot be the name of a node",
            name=name[:80],
            hint="use up to {most} small letters a to z, digits and hyphens inside, such as laptop-ana",
            most=MAX_NAME,
        )


def node_of(worker: str) -> str:
    return worker.partition("/")[0]


Count = Annotated[int, Field(ge=0, lt=2**63)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, AfterValidator(lambda text: one_line(text, most=MAX_TEXT))]
Facts = Annotated[Mapping[Text, Text], Field(max_length=MAX_FACTS)]
SomeUsage = Annotated[Usage, PlainSerializer(usage_data)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a worker. `environment`: its program, which must be the coordinator's, and what must match
    only in strict mode: torch build, device kind, threads, ...

    `speed_hint`: how fast it thinks it is beside the others, in any unit; used until it is measured.
    """

    speed_hint: Annotated[float, Field(gt=1e-6, lt=1e6)]  # beside one of 1e-300 nothing else is a number any more
    environment: Facts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Heartbeat: `micro_steps` counts everything the worker has finished since it joined.

    `part`: of its lease, so far, from 0 to 1; for who watches.
    """

    micro_steps: Count
    part: Fraction = 0.0


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The answer to a lease, with the strategy's tensors, which must not change until the next Version.

    `valid` is False when the worker itself found a non-finite or overflowing value.

    `transfer_seconds` to get the version before it, and to hand it over, which its link adds: what of a round costs
    this worker as much however few units it has. How long it takes in all, the coordinator sees.
    """

    lease_id: Count
    tokens: Count
    loss_sum: Real
    tensors: Annotated[Tensors, Field(exclude=True)] = field(default_factory=dict)
    transfer_seconds: Amount = 0.0
    valid: bool = True


@dataclass(frozen=True, kw_only=True)
class SaidLine:
    """A line of a worker's log."""

    level: Annotated[str, Field(pattern="^(info|warning|error)$")]
    text: Text


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """How a worker's machine is, every few seconds, for who watches: nothing of the training depends on it.

    `waiting_part`: of the time since the report before. Bytes per second: while tensors travelled. `dropped`: how many
    lines there were beside `lines`. `facts`: what it is, in the first of a session.
    """

    usage: SomeUsage = field(default_factory=Usage)
    phase: Annotated[str, Field(pattern="^[a-z]*$")] = ""
    waiting_part: Fraction | None = None
    sent_bytes_per_second: Amount | None = None
    received_bytes_per_second: Amount | None = None
    round_trip_seconds: Amount | None = None
    lines: Annotated[tuple[SaidLine, ...], Field(max_length=MAX_LINES)] = ()
    dropped: Count = 0
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Goodbye:
    """The worker leaves in order: what it holds goes back."""

    reason: Text


@dataclass(frozen=True, kw_only=True)
class Version:
    """A committed state, in the strategy's form for the next round. `version`: the run's optimizer steps so far.

    `standbys`: where the crew would go on without this coordinator. `term`: how many times the crew was promoted to
    another machine, as far as this coordinator knows. A link between machines fills them in.
    """

    version: Count
    next_round_steps: Annotated[int, Field(gt=0, le=MAX_UNITS)] = 1
    parameters: Annotated[TensorRef, Field(exclude=True)] = None
    standbys: Annotated[tuple[Text, ...], Field(max_length=MAX_FACTS)] = ()
    term: Count = 0


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Units to compute from `version`, in so many optimizer steps, `parts` for each step of the run. Losses are divided
    by the round's `planned_tokens`, so that sums stay small in fp16. `whole`: these are all units of the round.
    """

    lease_id: Count
    version: Count
    units: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_UNITS)]
    planned_tokens: Annotated[int, Field(gt=0, lt=2**63)]
    steps: Annotated[int, Field(gt=0, le=MAX_UNITS)] = 1
    parts: Annotated[int, Field(gt=0, le=MAX_UNITS)] = 1
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run has ended, or the worker is no longer wanted. `again`: it may join anew at once (it was silent)."""

    reason: Text
    refused: bool = False
    again: bool = False


# -- calls beside a session ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Describe:
    """What is trained? Answered by a `RunDescription`."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a node needs to become a worker of this run: its configuration as JSON, and files by relative path."""

    config: str
    files: Mapping[str, tuple[Path, str]]
    """Relative path → where it lies here, and its SHA-256 in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class OfferedFile:
    path: str
    sha256: Sha256
    num_bytes: Count


def offered(files: Mapping[str, tuple[Path, str]]) -> tuple[OfferedFile, ...]:
    """What is said of files that lie here."""
    return tuple(
        OfferedFile(path=name, sha256=sha256, num_bytes=here.stat().st_size) for name, (here, sha256) in files.items()
    )


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What the coordinator trains: its resolved configuration as JSON, and the files a worker needs."""

    config: str
    files: tuple[OfferedFile, ...]
    cuadrilla: Text = ""
    """The coordinator's version."""
    term: Count = 0
    """As in `Version`."""
    takes_jobs: bool = False
    """Nothing is trained together there: a session is given whole runs (`link/jobs.py`)."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """My name is free again, and my token opens nothing any more."""


@dataclass(frozen=True, kw_only=True)
class Enroll:
    """A new node's name for itself."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """Under which name the node is in the crew, and its token."""

    name: Text
    token: str


@dataclass(frozen=True, kw_only=True)
class Download:
    """A version, or else a file by its SHA-256 in hexadecimal, from `offset` on."""

    version: Count | None = None
    sha256: str = ""
    offset: Count = 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """Are you there? Bytes that follow are counted and thrown away. Answered by `Counted`, and by as many bytes as get
    through in so many `seconds`."""

    seconds: Annotated[float, Field(ge=0, le=60)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Counted:
    """So many bytes have arrived."""

    num_bytes: Count


@dataclass(frozen=True, kw_only=True)
class Follow:
    """A standby asks for what makes a coordinator, as it grows. `address`: where it would coordinate; `manifest`: that
    of its newest checkpoint.
    """

    address: str
    manifest: bytes = b""


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A file that has `num_bytes` by now; its next bytes follow."""

    name: str
    num_bytes: Count


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
                hint="stop it there (cuadrilla stop); the crew goes on where it was promoted",
            )
        if term > self.value:
            self.value = term
            self.learned(term)


class Refused(LinkError):
    """The coordinator was reached, and this node is not to work for it: trying again does not help."""


ToCoordinator = Hello | Progress | Contribution | Goodbye
ToWorker = Version | Lease | Stop


class Link(Protocol):
    """A worker's way to the coordinator. Raises LinkError when the coordinator cannot be reached any more.

    Used by one thread.
    """

    def call(self, message: ToCoordinator) -> None:
        """Send a message; returns when the coordinator has it, or will have it: tensors have travelled by then."""

    def next_event(self) -> ToWorker:
        """Wait for the next message to this worker."""

    def interrupted(self) -> bool:
        """True when a Stop or another lease is waiting: nobody wants what is being computed. Never blocks."""

    def download(self, ref: TensorRef) -> Tensors:
        """The tensors behind a ref from the coordinator."""

    def close(self) -> None:
        """Leave the link; safe to call twice."""
