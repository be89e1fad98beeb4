"""The `Link` protocol and the messages that travel on it.

A link carries small messages both ways, and named tensors. The in-process link passes tensors by reference, so a
receiver copies what it wants to keep. Every implementation delivers the messages of one worker in order.

Between machines a message is JSON (`wire.py`). The annotations of its fields bound what another machine may send. They
are checked when a message arrives, not when this machine makes one.
"""

import re
from collections.abc import Mapping
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

TensorRef = object  # identifies a Version's tensors at both ends of one link
KICKED = Message("this machine was removed from the crew (`cuadrilla kick` where the coordinator runs)")
NOT_LISTED = Message("this node is not in the crew; it may have been removed with `cuadrilla kick`")
LEAVES = Message("this machine leaves")
COME_AGAIN = "ask there for a new invite, then: cuadrilla join --forget; cuadrilla join"
COORDINATOR = "coordinator"
"""The name of the coordinator's own machine in a run. No node may have it."""
MAX_NAME = 63
NODE_NAME = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?")

MAX_UNITS = 2**20
MAX_TEXT = 1000
"""Characters of a text from another machine. It is printed here, in one line."""
MAX_FACTS = 100
MAX_LINES = 20


def check_node_name(name: str) -> None:
    """Raises LinkError unless `name` can name a node. Names are shown on terminals and used in file names."""
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
    """First message of a worker. `environment`: its program, which must equal the coordinator's; torch build, device
    kind, threads, ..., which must match only in strict mode.

    `speed_hint`: its speed relative to other workers, as it estimates it, in any unit; used until it is measured.
    """

    speed_hint: Annotated[float, Field(gt=1e-6, lt=1e6)]  # with one of 1e-300 the speeds computed from it overflow
    environment: Facts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Heartbeat. `micro_steps`: passes that the worker has finished since it joined. `part`: the finished part of its
    lease, from 0 to 1, which is only displayed.
    """

    micro_steps: Count
    part: Fraction = 0.0


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The answer to a lease. Its tensors, the strategy's, must not change until the next Version.

    `transfer_seconds`: the time to download the version and to send this contribution; the link adds the second part.
    It does not depend on the number of units. The coordinator itself measures the total time of the lease. `valid` is
    False if the worker found a non-finite or overflowing value.
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
    """The state of a worker's machine, sent every few seconds for monitoring. The training does not depend on it.

    `waiting_part`: part of the time since the last report in which the worker waited. Bytes per second: of transfers
    of tensors. `dropped`: log lines that are not in `lines`. `facts`: about the machine, in a session's first report.
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
    """The worker leaves; its leases are free again."""

    reason: Text


@dataclass(frozen=True, kw_only=True)
class Version:
    """A committed state, in the strategy's form for the next round. `version`: the run's optimizer steps so far.

    `standbys`: addresses of machines that can take over as coordinator; a link between machines fills them in.
    """

    version: Count
    next_round_steps: Annotated[int, Field(gt=0, le=MAX_UNITS)] = 1
    parameters: Annotated[TensorRef, Field(exclude=True)] = None
    standbys: Annotated[tuple[Text, ...], Field(max_length=MAX_FACTS)] = ()


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Units to compute, starting from `version`, in `steps` optimizer steps: `parts` for each step of the run. Losses
    are divided by the round's `planned_tokens`, so that sums stay small in fp16. `whole`: it has all the round's units.
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
    """The run has ended, or this worker is removed. `again`: it may rejoin at once (it was only silent)."""

    reason: Text
    refused: bool = False
    again: bool = False


# -- calls beside a session ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Describe:
    """Asks what is trained. Answered by a `RunDescription`."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a node needs to become a worker of this run: its configuration as JSON, and files by relative path."""

    config: str
    files: Mapping[str, tuple[Path, str]]
    """Relative path → the file's path on this machine, and its SHA-256 in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class OfferedFile:
    path: str
    sha256: Sha256
    num_bytes: Count


def offered(files: Mapping[str, tuple[Path, str]]) -> tuple[OfferedFile, ...]:
    """The descriptions of files on this machine."""
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
    """How many times a standby was promoted in this crew, as far as this coordinator knows."""
    takes_jobs: bool = False
    """No run is trained together: each session is assigned whole runs (`link/jobs.py`)."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The node leaves the crew: its name is free again, and its token is not valid any more."""


@dataclass(frozen=True, kw_only=True)
class Enroll:
    """Asks to join the crew under this name."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """The node's name in the crew, and its token."""

    name: Text
    token: str


@dataclass(frozen=True, kw_only=True)
class Download:
    """Asks for a version, or for a file from byte `offset` on. `path`: its name in what is offered to this worker; for
    a standby also in the run directory."""

    version: Count | None = None
    path: str = ""
    offset: Count = 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """Asks whether the coordinator answers, and measures the link. The bytes that follow are dropped. The answer is
    bytes for this many `seconds`."""

    seconds: Annotated[float, Field(ge=0, le=60)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Follow:
    """A standby asks what it lacks. `address`: where it would coordinate; `manifest`: that of its newest checkpoint;
    `version` and `crc`: of the newest record of its journal.
    """

    address: str
    manifest: bytes = b""
    version: Count = 0
    crc: Count = 0


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What a standby lacks: `records` of the journal and then a `checkpoint`, by version. `crew_files`: keys and nodes
    of the crew, and the newest announced version, as JSON; they count once the standby has the records."""

    crew_files: str
    records: tuple[Count, ...] = ()
    checkpoint: Count | None = None


class Refused(LinkError):
    """The coordinator answered and refuses this node: to try again does not help."""


ToCoordinator = Hello | Progress | Contribution | Goodbye
ToWorker = Version | Lease | Stop


class Link(Protocol):
    """A worker's connection to the coordinator. All methods raise LinkError once the coordinator is out of reach.

    Used by one thread.
    """

    def call(self, message: ToCoordinator) -> None:
        """Send a message. Returns when its tensors, if it has any, have been sent."""

    def next_event(self) -> ToWorker:
        """Wait for the next message to this worker."""

    def interrupted(self) -> bool:
        """Whether a Stop or another lease is waiting, so that the present lease is useless. Never blocks."""

    def download(self, ref: TensorRef) -> Tensors:
        """The tensors of a Version, by its `parameters`."""
