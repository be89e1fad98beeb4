"""The members of a run: joining, silence, speed, failures. Without I/O, clock or chance.

A member's speed is measured by the coordinator's clock, from the lease to the answer. The member itself only says how
much of that time was transfer, and a bound limits that.

A node that fails units that others can compute is left out, from the second such round until the coordinator restarts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cuadrilla.link.base import Hello, Progress, ToCoordinator, node_of
from cuadrilla.messages import Message
from cuadrilla.plan.share import Pace
from cuadrilla.sync.events import Grant

QUORUM_SECONDS = 15.0
MAX_FAILED_ROUNDS = 2
BANNED = Message(
    "excluded: its contributions were unusable in {rounds} rounds; to let it in again, restart the coordinator "
    "(cuadrilla stop, then cuadrilla up RUN)",
    rounds=MAX_FAILED_ROUNDS,
)
SPEED_MEMORY = 0.5
MIN_MEASUREMENTS = 2
"""A member counts as measured after this many answers, of which the last one alone counts: in the first one caches are
cold and code is compiled."""
HUNG_AFTER_SECONDS, HUNG_FACTOR = 10.0, 3.0
"""A member hangs without progress for this time, and this many times its lease's time: one pass may hold the lease."""
MAX_TRANSFER_SHARE = 0.98
"""Largest part of the time to an answer that counts as transfer. With more, a member's speed would look too high."""
MIN_HELD_SECONDS = 0.5
"""A revoked lease counts as held for at least this long: a shorter time says nothing about its worker's speed."""
UNKNOWN_SECONDS = 20.0
"""Expected time of a new member's lease until its first pass, at least: it may be downloading the version."""
FIRST_PROGRESS_SECONDS = 600.0
"""A member has at least this long for each pass of its first lease, in which it may compile its model."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Constants of a run. `lost_after_seconds` is None where the transport itself reports deaths (threads)."""

    units_per_step: int
    step_tokens: int
    """Planned tokens of one optimizer step of the whole crew."""
    num_steps: int
    quorum: int = 1
    """The first lease waits for this many members, less those that were refused or have left, but at most
    `QUORUM_SECONDS` after the first of them joined. Else that member would get the whole round, however slow it is."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """What every member's environment must contain: the version of cuadrilla, a hash of the model's code."""
    same_environment: bool = False
    lost_after_seconds: float | None = None


@dataclass(kw_only=True)
class Member:
    """`hint`: the speed it claims, in any unit; `units_per_second`: running mean of the measured speed, at first 0.
    `transfer_seconds`: in an exact round. `micro_steps`: passes done, as the worker counts them; `rounds_without`:
    rounds since it last had a share. `began_at`: the end of the first pass of its newest lease, infinite before.
    """

    hint: float
    units_per_second: float = 0.0
    transfer_seconds: float = 0.0
    measurements: int = 0
    rounds_without: int = 0
    heard_at: float
    progress_at: float
    began_at: float = math.inf
    micro_steps: int = 0

    @property
    def is_fetching(self) -> bool:
        """Whether it may still download the version of its lease."""
        return self.began_at == math.inf

    @property
    def fetches_long(self) -> bool:
        """Whether its last lease was revoked before it had the version."""
        return self.is_fetching and self.transfer_seconds > 0


@dataclass(kw_only=True)
class Membership:
    """`now`: set by the coordinator at each event. `members`: in the order in which they joined.

    `failed_rounds`: for each node, rounds in which it failed units that others could compute. `banned`: nodes that are
    left out for it. `environment`: that of the first member, in strict mode. `volume`: bytes that a round moves / those
    of an exact round. `waits_until`: time of the first lease, without a quorum. `known`: all workers that were heard.
    """

    rules: Rules
    now: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    failed_rounds: Counter[str] = field(default_factory=Counter)
    banned: set[str] = field(default_factory=set)
    environment: Mapping[str, str] = field(default_factory=dict)
    volume: float = 1.0
    waits_until: float = math.inf
    known: set[str] = field(default_factory=set)

    # -- coming and going ----------------------------------------------------------------------------------------------

    def admit(self, worker: str, hello: Hello) -> str:
        """Make a worker a member. Returns "", or why it is refused. In strict mode all environments must equal the
        first member's."""
        if node_of(worker) in self.banned:
            return BANNED
        if different := _differing(self.rules.fingerprint, hello.environment):
            template = "its program differs from the coordinator's: {different}; all machines need the same version"
            return Message(template, different=different)
        if self.rules.same_environment:
            self.environment = self.environment or hello.environment
            if different := _differing(self.environment, hello.environment):
                template = "strict mode needs identical machines; here these differ: {different}"
                return Message(template, different=different)
        self.members[worker] = Member(hint=hello.speed_hint, heard_at=self.now, progress_at=self.now)
        self.waits_until = min(self.waits_until, self.now + QUORUM_SECONDS)
        return ""

    @property
    def has_quorum(self) -> bool:
        """Whether the first round can begin: enough workers were heard, or the wait is over."""
        return len(self.known) >= self.rules.quorum or self.now >= self.waits_until

    # -- signs of life -------------------------------------------------------------------------------------------------

    def hear(self, worker: str, message: ToCoordinator) -> bool:
        """Note a sign of life, which an unusable answer is, too. False if the worker is not a member."""
        self.known.add(worker)
        member = self.members.get(worker)
        if member is not None:
            member.heard_at = self.now
            if isinstance(message, Progress) and message.micro_steps > member.micro_steps:
                member.micro_steps, member.progress_at = message.micro_steps, self.now
                if message.part:  # else it is of the lease before
                    member.began_at = min(member.began_at, self.now)
        return member is not None

    def why_evict(self, worker: str, lease: Grant | None) -> str:
        """Why this member must be removed, as silent or as hanging in `lease`; "" if it need not be."""
        member, lost_after = self.members[worker], self.rules.lost_after_seconds
        if lost_after is None:
            return ""
        if self.now - member.heard_at > lost_after:
            return Message("lost: nothing heard for {seconds:.1f} s", seconds=self.now - member.heard_at)
        if lease is None:
            return ""
        idle = self.now - max(member.progress_at, lease.at)
        limit = max(HUNG_AFTER_SECONDS, 2 * lost_after, HUNG_FACTOR * self.expected_seconds(lease))
        if not member.measurements:
            limit = max(limit, FIRST_PROGRESS_SECONDS)
        return Message("hung: no progress for {seconds:.1f} s", seconds=idle) if idle > limit else ""

    # -- speed ---------------------------------------------------------------------------------------------------------

    def expected_seconds(self, lease: Grant) -> float:
        """Expected seconds from grant to answer."""
        member = self.members[lease.worker]
        if not any(each.measurements for each in self.members.values()):
            return max(UNKNOWN_SECONDS, 2 * (member.progress_at - lease.at))
        expected = self.paces()[lease.worker].seconds(len(lease.units))
        if member.measurements:
            return expected
        return max(expected, UNKNOWN_SECONDS) if member.is_fetching else expected + 2 * (member.began_at - lease.at)

    def speeds(self) -> dict[str, float]:
        """Units per second of each member. The speed of an unmeasured member is its hint, scaled by the measured
        members' speed per hint."""
        measured = [member for member in self.members.values() if member.units_per_second]
        scale = sum(m.units_per_second for m in measured) / sum(m.hint for m in measured) if measured else 1.0
        return {
            name: member.units_per_second or max(member.hint * scale, 1e-9) for name, member in self.members.items()
        }

    def paces(self, *, group: int = 1, volume: float | None = None) -> dict[str, Pace]:
        """The time that groups of so many units, and the transfers of a round, take each member. `volume`: if not that
        of the present rounds."""
        moved = self.volume if volume is None else volume
        return {
            name: Pace(units_per_second=speed / group, fixed_seconds=self.members[name].transfer_seconds * moved)
            for name, speed in self.speeds().items()
        }

    def measure(self, lease: Grant, *, transfer: float) -> None:
        """Update a member's speed from an answered lease. `transfer`: seconds in which tensors were sent or fetched."""
        member = self.members[lease.worker]
        seconds = self.now - lease.at
        if seconds <= 0:
            return
        transfer = min(transfer, MAX_TRANSFER_SHARE * seconds)
        memory = SPEED_MEMORY if member.measurements >= MIN_MEASUREMENTS else 0.0
        member.units_per_second += (1 - memory) * (len(lease.units) / (seconds - transfer) - member.units_per_second)
        member.transfer_seconds += (1 - memory) * (transfer / self.volume - member.transfer_seconds)
        member.measurements += 1

    def note_revoked(self, leases: Iterable[Grant]) -> None:
        """Lower a worker's speed to what a revoked lease shows: in the time it was held, it was not finished. This
        counts as a measurement, or the worker would be tried again in each round. Before the first pass the time says
        nothing about the speed of a new member: its transfers take at least as long.
        """
        for lease in leases:
            member, held = self.members[lease.worker], self.now - lease.at
            if member.is_fetching and member.measurements < MIN_MEASUREMENTS:
                member.transfer_seconds = max(member.transfer_seconds, held / self.volume)
                continue
            at_most = len(lease.units) / max(held - member.transfer_seconds * self.volume, MIN_HELD_SECONDS)
            member.measurements += 1
            if not member.units_per_second or at_most < member.units_per_second:
                member.units_per_second = at_most

    # -- failures ------------------------------------------------------------------------------------------------------

    def ban(self, failed: Iterable[str]) -> list[str]:
        """Note that these workers failed units in a round that others could compute. Returns the members to remove.

        A node is not removed if no other node would be left.
        """
        sent_away: list[str] = []
        for node in sorted({node_of(worker) for worker in failed}):
            self.failed_rounds[node] += 1
            own = self.of_node(node) & self.members.keys()
            if self.failed_rounds[node] >= MAX_FAILED_ROUNDS and self.members.keys() - own - set(sent_away):
                self.banned.add(node)
                sent_away.extend(sorted(own))
        return sent_away

    def of_node(self, worker: str) -> set[str]:
        """The worker and all members of its node: they share one token."""
        return {worker} | {member for member in self.members if node_of(member) == node_of(worker)}


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The entries of `ours` that differ in `theirs`, as text."""
    return ", ".join(
        f"{key} {theirs.get(key, '–')} ≠ {ours[key]}" for key in sorted(ours) if theirs.get(key) != ours[key]
    )
