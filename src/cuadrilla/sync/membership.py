"""Who takes part in a run: joining, silence, speed, failures. Without I/O, clock or chance.

How fast a member is, is measured by this machine's clock, from the lease to the answer. Of what a member says about
itself only how that time divides into computing and transfer is used, within bounds.

A node that fails what others can compute is left out in the second round in which it does, for ten minutes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from cuadrilla.link.base import Hello, Progress, node_of
from cuadrilla.messages import Message
from cuadrilla.plan.share import Pace
from cuadrilla.sync.ledger import Grant

MAX_FAILED_ROUNDS = 2
BAN_SECONDS = 600.0
SPEED_MEMORY = 0.5
MIN_MEASUREMENTS = 2
"""The first answer of a member tells little: caches are cold, code is compiled."""
MAX_TRANSFER_SHARE = 0.9
"""Part of the time to an answer: a member that claims more would look faster than it can be shown to be."""
MIN_HELD_SECONDS = 0.5
"""A lease that ends unanswered sooner says nothing about its worker's speed."""
FIRST_PROGRESS_SECONDS = 600.0
"""A worker's first pass may compile its model; a member that nothing is known of yet may take as long."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What holds for a whole run. Timeouts of None: the transport itself reports deaths (threads of one process)."""

    units_per_step: int
    step_tokens: int
    """Planned tokens of an optimizer step of the whole crew."""
    num_steps: int
    quorum: int = 1
    """This many members are waited for before the first lease, but no longer than `quorum_seconds` after the first one
    came: otherwise that one would get the whole round, however slow it is."""
    quorum_seconds: float = 15.0
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """What the environment of every member must say: the version of cuadrilla, the model's code."""
    same_environment: bool = False
    lost_after_seconds: float | None = None
    hung_after_seconds: float | None = None
    hung_factor: float = 3.0
    """A member hangs after so many times the expected time of its lease without progress: a pass may hold all of it."""
    late_factor: float = 1.5
    """A lease that takes this many times as long as it should is late: idle members try its units, too."""


@dataclass(kw_only=True)
class Member:
    """`hint`: the speed it claims, in any unit; `units_per_second`: a running mean of what was measured, 0 before.

    `micro_steps`: the worker's own count of work done. `rounds_without`: since it was given its last unit.
    """

    hint: float
    units_per_second: float = 0.0
    transfer_seconds: float = 0.0
    measurements: int = 0
    rounds_without: int = 0
    heard_at: float
    progress_at: float
    micro_steps: int = 0


@dataclass(kw_only=True)
class Membership:
    """`now` is set by the coordinator at each event. `members`: in the order in which they came.

    `failed_rounds` of a node: rounds in which it failed what others could compute. `banned_until`: seconds of `now`.
    """

    rules: Rules
    now: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    failed_rounds: Counter[str] = field(default_factory=Counter)
    banned_until: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] | None = None
    waiting_since: float | None = None
    has_quorum: bool = False
    departed: set[str] = field(default_factory=set)
    """Expected workers that were refused or died: the first round does not wait for them."""

    # -- coming and going ----------------------------------------------------------------------------------------------

    def admit(self, worker: str, hello: Hello) -> str:
        """Make this worker a member: "", or the reason why it cannot be one."""
        if reason := self._unsuitable(worker, hello.environment):
            self.depart(worker)
            return reason
        self.departed.discard(worker)
        self.members[worker] = Member(hint=hello.speed_hint, heard_at=self.now, progress_at=self.now)
        return ""

    def _unsuitable(self, worker: str, environment: Mapping[str, str]) -> str:
        """In strict mode the first one says what the others must be like."""
        if (seconds := self.banned_until.get(node_of(worker), self.now) - self.now) > 0:
            return banned(seconds)
        if different := _differing(self.rules.fingerprint, environment):
            template = "its program differs from the coordinator's: {different}; all machines need the same version"
            return Message(template, different=_listed(different))
        if self.rules.same_environment:
            if self.environment is None:
                self.environment = dict(environment)
            if different := _differing(self.environment, environment, also_new=True):
                template = "strict mode needs identical machines; here these differ: {different}"
                return Message(template, different=_listed(different[:3]))
        return ""

    def depart(self, worker: str) -> None:
        """It is not waited for any more."""
        if not self.has_quorum:
            self.departed.add(worker)

    def note_quorum(self) -> bool:
        """Note how many have come; whether the first round need not wait for others any more."""
        if not self.has_quorum and self.members:
            since = self.waiting_since = self.now if self.waiting_since is None else self.waiting_since
            expected = self.rules.quorum - len(self.departed)
            self.has_quorum = len(self.members) >= expected or self.now - since >= self.rules.quorum_seconds
        return self.has_quorum

    # -- signs of life -------------------------------------------------------------------------------------------------

    def hear(self, worker: str, progress: Progress) -> bool:
        """A sign of life; False of one that is no member."""
        member = self.members.get(worker)
        if member is None:
            return False
        member.heard_at = self.now
        if progress.micro_steps > member.micro_steps:
            member.micro_steps, member.progress_at = progress.micro_steps, self.now
        return True

    def why_evict(self, worker: str, lease: Grant | None) -> str:
        """Why a member, which holds this lease, is not waited for any more; "" while it is."""
        rules, member = self.rules, self.members[worker]
        if rules.lost_after_seconds is not None and self.now - member.heard_at > rules.lost_after_seconds:
            return Message("lost: nothing heard for {seconds:.1f} s", seconds=self.now - member.heard_at)
        if rules.hung_after_seconds is None or lease is None:
            return ""
        last, expected = max(member.progress_at, lease.at), self.expected_seconds(lease)
        idle, known = self.now - last, last - lease.at if math.isinf(expected) else expected
        limit = max(rules.hung_after_seconds, rules.hung_factor * known)
        if not member.micro_steps:
            limit = max(limit, FIRST_PROGRESS_SECONDS)
        return Message("hung: no progress for {seconds:.1f} s", seconds=idle) if idle > limit else ""

    # -- speed ---------------------------------------------------------------------------------------------------------

    def expected_seconds(self, lease: Grant) -> float:
        """From its grant to its answer; infinite as long as nobody was measured."""
        if not any(member.measurements for member in self.members.values()):
            return math.inf
        return self.paces()[lease.worker].seconds(len(lease.units))

    def speeds(self) -> dict[str, float]:
        """Units per second of each member; one not measured yet counts as its hint beside the measured ones'."""
        measured = [member for member in self.members.values() if member.units_per_second]
        scale = sum(m.units_per_second for m in measured) / sum(m.hint for m in measured) if measured else 1.0
        return {
            name: member.units_per_second or max(member.hint * scale, 1e-9) for name, member in self.members.items()
        }

    def paces(self) -> dict[str, Pace]:
        """What a round costs each member."""
        return {
            name: Pace(units_per_second=speed, fixed_seconds=self.members[name].transfer_seconds)
            for name, speed in self.speeds().items()
        }

    def measure(self, lease: Grant, *, transfer: float) -> None:
        """It is answered. `transfer`: how much of the time went to weights and gradients."""
        member = self.members[lease.worker]
        seconds = self.now - lease.at
        if seconds <= 0:
            return
        transfer = min(transfer, MAX_TRANSFER_SHARE * seconds)
        memory = SPEED_MEMORY if member.measurements else 0.0
        member.units_per_second += (1 - memory) * (len(lease.units) / (seconds - transfer) - member.units_per_second)
        member.transfer_seconds += (1 - memory) * (transfer - member.transfer_seconds)
        member.measurements += 1

    def change_transfers(self, factor: float) -> None:
        """From now on so many times as much travels."""
        for member in self.members.values():
            member.transfer_seconds *= factor

    def note_revoked(self, leases: Iterable[Grant]) -> None:
        """The time that a revoked lease was held bounds its worker's speed. It counts as a measurement, or the worker
        would be tried in each round.
        """
        for lease in leases:
            member, held = self.members[lease.worker], self.now - lease.at
            at_most = len(lease.units) / max(held, MIN_HELD_SECONDS)
            member.measurements += 1
            if not member.units_per_second or at_most < member.units_per_second:
                member.units_per_second = at_most

    # -- failures ------------------------------------------------------------------------------------------------------

    def ban(self, failed: Iterable[str]) -> list[str]:
        """Note that these workers failed in a round what others could compute; the members to send away for that.

        Where no other node would be left, nobody is.
        """
        sent_away: list[str] = []
        for node in sorted({node_of(worker) for worker in failed}):
            self.failed_rounds[node] += 1
            own = self.of_node(node) & self.members.keys()
            if self.failed_rounds[node] < MAX_FAILED_ROUNDS or not self.members.keys() - own - set(sent_away):
                continue
            del self.failed_rounds[node]
            self.banned_until[node] = self.now + BAN_SECONDS
            sent_away.extend(sorted(own))
        return sent_away

    def of_node(self, worker: str) -> set[str]:
        """The members of this worker's node, it among them: one key speaks for all of them."""
        return {worker} | {member for member in self.members if node_of(member) == node_of(worker)}


def banned(seconds: float) -> Message:
    """Why a node may not take part for so long."""
    template = "left out for {minutes} min: unusable contributions in {rounds} rounds"
    return Message(template, minutes=math.ceil(seconds / 60), rounds=MAX_FAILED_ROUNDS)


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str], *, also_new: bool = False) -> list[Message]:
    """What is other there than here; `also_new`: what is only known there, too."""
    none = Message("none")
    return [
        Message("{key} ({theirs} instead of {ours})", key=key, theirs=theirs.get(key, none), ours=ours.get(key, none))
        for key in sorted(ours.keys() | (theirs.keys() if also_new else set()))
        if ours.get(key) != theirs.get(key)
    ]


def _listed(parts: Iterable[Message]) -> Message:
    return reduce(lambda one, other: Message("{one}, {other}", one=one, other=other), parts)
