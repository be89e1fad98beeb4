"""The coordinator's side of a simulated run: weights of one integer, a disk with crashes, and an audit of the run.

The weights are θ(v+H) = mix(θ(v), Σ gradient(unit, θ(v))) for rounds of H steps. So a unit that is lost, counted twice
or computed from another version changes all later weights. Writes to the disk have the order of `train/store.py`, and a
crash is possible between any two. The invariants, which are checked here and in `run.py`:

I1  Each unit of a run is counted exactly once, or skipped after two failures. A unit is either free, leased, counted or
    skipped. Only members hold leases, each at most one (two members have the units of a late lease).
I2  A version is committed once. A version that was announced is never made again.
I3  A worker that reports version v holds θ(v). θ(v) follows from the θ before it and the gradients of the counted
    units, which were computed at that earlier θ.
I4  A version is on disk before it is announced. No worker sees versions decrease. (A full disk excuses both, since
    training goes on.)
I5  The run ends. No units are free while members are idle. A commit follows soon after the last fault. No worker is
    called lost or hung before its time.
I6  The units and tokens of a round do not depend on which workers are present.
I7  The disk can be loaded at any moment, and holds a version that was made.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cuadrilla.errors import ResourceError
from cuadrilla.sync.events import Answer
from cuadrilla.sync.membership import Rules
from cuadrilla.sync.merge import Reduced
from cuadrilla.train.guard import Verdict

UNIT_TOKENS = 10
RULES = Rules(units_per_step=8, step_tokens=8 * UNIT_TOKENS, num_steps=20, lost_after_seconds=5.0)
MASK = 2**64 - 1
CHECKPOINT_EVERY = 4
KEPT_CHECKPOINTS = 2


class Violation(AssertionError):
    """An invariant does not hold. The text says which one, when, and after which faults."""


class Crash(BaseException):
    """The coordinator's process dies here. A BaseException, so that the shell does not handle it as an error."""


@dataclass(frozen=True, kw_only=True)
class SimFault:
    """`seconds`: how long the fault lasts, or until a dead process is back. `steps`: steps of I/O before it strikes."""

    at: float
    kind: str
    worker: str = ""
    seconds: float = 0.0
    steps: int = 0


@dataclass(kw_only=True)
class SimReport:
    """`committed`: versions in order. After a loss that a full disk excuses, versions are committed again."""

    seed: int
    faults: tuple[SimFault, ...]
    committed: list[int] = field(default_factory=list)
    committed_at: list[float] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    theta: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def mix(*values: int) -> int:
    """64 bits that depend on every bit of every value."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & MASK
        state ^= state >> 29
    return state


def gradient(units: Sequence[int], theta: int) -> int:
    return sum(mix(unit, theta) for unit in units) & MASK


def as_tensor(number: int) -> Tensor:
    """Represent 64 bits as a tensor, so that they can be sent like weights."""
    return torch.tensor(number - 2**64 if number >= 2**63 else number, dtype=torch.int64)


def number_of(tensor: Tensor) -> int:
    return int(tensor) & MASK


def version_before(version: int, *, steps: int) -> int:
    """The version from which the round of so many steps that makes `version` begins."""
    return (version - 1) // steps * steps


def round_units(version: int, *, steps: int, rules: Rules) -> tuple[int, ...]:
    """The units of the round that makes this version."""
    first = version_before(version, steps=steps)
    return tuple(range(first * rules.units_per_step, version * rules.units_per_step))


def versions(rules: Rules = RULES, *, steps: int = 1) -> list[int]:
    """All versions of a run."""
    return [min(first + steps, rules.num_steps) for first in range(0, rules.num_steps, steps)]


def undisturbed(rules: Rules = RULES, *, steps: int = 1) -> int:
    """The last θ of a run without faults."""
    theta = 0
    for version in versions(rules, steps=steps):
        theta = mix(theta, gradient(round_units(version, steps=steps, rules=rules), theta))
    return theta


@dataclass(frozen=True)
class SimAnswer:
    """A contribution: its units, the version and θ they were computed from, and the sum of their gradients."""

    units: tuple[int, ...]
    version: int
    base: int
    total: int
    finite: bool

    def tensors(self) -> dict[str, Tensor]:
        return {
            "units": torch.tensor(self.units),
            "version": torch.tensor(self.version),
            "base": as_tensor(self.base),
            "total": as_tensor(self.total),
            "finite": torch.tensor(self.finite),
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "SimAnswer":
        return cls(
            units=tuple(tensors["units"].tolist()),
            version=int(tensors["version"]),
            base=number_of(tensors["base"]),
            total=number_of(tensors["total"]),
            finite=bool(tensors["finite"]),
        )


@dataclass
class SimWeights:
    """The merge half of any strategy, over one integer. `merged`: the contributions of the last reduction."""

    point: Callable[[], None]
    theta: int
    total: int = 0
    merged: tuple[SimAnswer, ...] = ()

    def version(self, *, steps: int) -> dict[str, Tensor]:
        del steps
        return {"theta": as_tensor(self.theta)}

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> Reduced:
        del planned_tokens
        self.merged = tuple(SimAnswer.of(answer.contribution.tensors) for answer in answers)
        bad = tuple(index for index, part in enumerate(self.merged) if not part.finite)
        self.total = sum(part.total for part in self.merged) & MASK
        return Reduced(update={"total": as_tensor(self.total)}, norm=math.nan if bad else 1.0, bad=bad)

    def norms(self, answers: Sequence[Answer]) -> list[float]:
        return [1.0 for _ in answers]

    def is_plausible(self, tensors: Mapping[str, Tensor], **claims: int) -> bool:
        del tensors, claims
        return True

    def step(self, update: Mapping[str, Tensor], *, norm: float, version: int, steps: int) -> float:
        del norm, version, steps
        self.point()
        self.theta = mix(self.theta, number_of(update["total"]))
        self.point()
        return 1.0


# -- the disk ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Disk:
    """What survives the coordinator's process. `behind`: a commit was announced and could not be written.

    `gaps`: checkpoints to which the journal does not lead, because the journal could not be written.
    """

    checkpoints: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    """Version, θ, and the rest of the state."""
    journal: dict[int, tuple[Mapping[str, Any], int]] = field(default_factory=dict)
    """By version: the header and the update."""
    gaps: set[int] = field(default_factory=set)
    full: bool = False
    behind: bool = False

    def lose_newest_checkpoint(self) -> None:
        """The newest checkpoint is damaged; what only it held is lost."""
        version, _, _ = self.checkpoints.pop()
        self.behind |= version in self.gaps


def recover(disk: Disk) -> tuple[dict[str, Any], dict[str, Any] | None, int, int]:
    """State of the coordinator, state of the guard, θ, and the CRC of the last record, as `Store.recover` reads them:
    from the newest checkpoint and the journal's records that follow it."""
    if not disk.checkpoints:
        return {"version": 0, "tokens": 0}, None, 0, 0
    _, theta, saved = disk.checkpoints[-1]
    state, guard, after = saved, saved["guard"], saved["journal"]
    for version, (header, total) in sorted(disk.journal.items()):
        if (version - header["steps"], header["after"]) == (state["version"], after):
            theta = mix(theta, total) if header["verdict"] == Verdict.OK.value else theta
            guard, after = header["guard"], record_crc(header, total)
            state = {"version": version, "tokens": header["tokens"]}
    return state, guard, theta, after


def record_crc(header: Mapping[str, Any], total: int) -> int:
    return mix(header["version"], mix(header["after"], total))


@dataclass
class VirtualStore:
    """`train/store.py` on a virtual disk: the same writes in the same order, with a `point` to die at between two."""

    point: Callable[[], None]
    disk: Disk
    weights: SimWeights
    audit: "Audit"
    saved: int
    after: int
    save_now: bool = False
    gap: bool = False
    unlogged: None = None  # there are no metrics
    best: None = None  # nor evaluations

    def journal(self, header: Mapping[str, Any], update: Mapping[str, Tensor]) -> None:
        self.audit.judge_round(header, self.weights)
        if self.save_now:
            return
        self.point()
        if self.disk.full:
            self.save_now, self.gap = True, True
            return
        self.point()  # only a temporary file is there
        header = {**header, "after": self.after}
        total = sum(number_of(total) for total in update.values())
        self.disk.journal[header["version"]], self.after = (header, total), record_crc(header, total)
        self.point()

    def after_commit(self, state: Mapping[str, Any], *, row: object, last: bool) -> None:
        del row
        self.audit.committed(version := state["version"], self.weights.theta)
        if not last and (self.save_now or version % CHECKPOINT_EVERY == 0):
            try:
                self.save(state)
            except ResourceError:
                self.disk.behind |= self.save_now

    def save(self, state: Mapping[str, Any]) -> None:
        version = state["version"]
        if version == self.saved:
            return
        self.point()
        if self.disk.full:
            raise ResourceError("the disk is full")
        self.disk.checkpoints.append((version, self.weights.theta, {**state, "journal": self.after}))
        self.disk.behind = False
        self.disk.gaps.difference_update([version])
        self.disk.gaps.update([version] if self.gap else [])
        self.saved, self.save_now, self.gap = version, False, False
        self.point()
        del self.disk.checkpoints[:-KEPT_CHECKPOINTS]
        self.point()
        oldest = self.disk.checkpoints[0][0]
        self.remove_records(lambda record: record <= oldest)

    def remove_records(self, unwanted: Callable[[int], bool]) -> None:
        for version in [version for version in self.disk.journal if unwanted(version)]:
            del self.disk.journal[version]
            self.point()

    def log(self, version: int, row: object) -> None:
        """Only monitors read metrics."""

    def event(self, kind: str, **fields: Any) -> None:
        self.audit.report.counts[kind] += 1
        self.audit.skipping = fields["units"] if kind == "units skipped" else self.audit.skipping
        self.point()

    @contextmanager
    def tolerating(self, what: object) -> Iterator[None]:
        del what
        try:
            yield
        except ResourceError as error:
            self.event("alarm", message=error.message)

    def status(self, state: str) -> None:
        """Only monitors read it."""


# -- the audit ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Audit:
    """Records what really happened: θ of every version, which versions were announced, which contributions were bad.

    `losses`: how often the disk held less after a restart than was announced, which only a full disk excuses.
    `units`: by version. `counted`: the units of all committed versions. `steps`: of a round.
    """

    report: SimReport
    disk: Disk
    clock: Callable[[], float]
    rules: Rules = RULES
    steps: int = 1
    units: dict[int, tuple[int, ...]] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    skipping: tuple[int, ...] = ()
    history: dict[int, int] = field(default_factory=lambda: {0: 0})
    tokens: dict[int, int] = field(default_factory=lambda: {0: 0})
    announced: int = 0
    bad_answers: Counter[int] = field(default_factory=Counter)
    skips: dict[int, tuple[int, ...]] = field(default_factory=dict)
    last_commit: float = 0.0
    version: int = 0
    losses: int = 0

    @property
    def next_version(self) -> int:
        return min(self.version + self.steps, self.rules.num_steps)

    def demand(self, sentence: str) -> None:
        """Raise Violation with this sentence, unless it is empty."""
        if sentence:
            now = self.clock()
            happened = ", ".join(f"{f.kind} {f.worker} {f.at:.2f}" for f in self.report.faults if f.at <= now)
            raise Violation(f"{sentence} (seed {self.report.seed}, {now:.3f} s, after: {happened})")

    def judge_round(self, header: Mapping[str, Any], weights: SimWeights) -> None:
        """Check a round from which a version is about to be made."""
        version, units, skipped = header["version"], tuple(header["units"]), header["skipped"]
        empty = len(skipped) == len(units)
        counted = [] if empty else [unit for part in weights.merged for unit in part.units]
        self.demand(units_wrong(header, counted, wanted=round_units(version, steps=self.steps, rules=self.rules)))
        if not self.counted.isdisjoint(units):
            self.demand(f"I1: version {version} is made of units {units} of an earlier version")
        self.demand(skipped_without_reason(skipped, self.bad_answers))
        self.demand("" if empty else self.sum_wrong(version, weights))
        tokens = self.tokens[version_before(version, steps=self.steps)] + UNIT_TOKENS * len(counted)
        if header["tokens"] != tokens:
            self.demand(f"I6: version {version} counts {header['tokens']} tokens instead of {tokens}")
        if version <= self.announced:
            self.demand(f"I2: version {version} was announced and is made again")
        self.tokens[version], self.units[version] = tokens, units
        self.history[version] = weights.theta if empty else mix(weights.theta, weights.total)
        self.skips[version] = tuple(skipped)

    def sum_wrong(self, version: int, weights: SimWeights) -> str:
        """Check that every contribution was computed from the version before, and that the total is their sum."""
        for part in weights.merged:
            age = version_before(version, steps=self.steps) - part.version
            if age or part.base != self.history[part.version]:
                return f"I3: a contribution to version {version} was computed from other weights, {age} versions old"
        total = sum(gradient(part.units, part.base) for part in weights.merged) & MASK
        return "" if weights.total == total else "I1: the sum is not that of the units counted"

    def committed(self, version: int, theta: int) -> None:
        now = self.clock()
        if theta != self.history.get(version):
            self.demand(f"I3: the weights of version {version} do not follow from version {self.version}")
        if version != self.next_version:
            self.demand(f"I2: version {version} is committed after version {self.version}")
        self.version, self.last_commit = version, now
        self.counted.update(self.units[version])
        self.report.committed.append(version)
        self.report.committed_at.append(now)

    def announce(self, version: int, theta: int) -> None:
        """Check a version that is sent to a worker."""
        if theta != self.history.get(version):
            self.demand(f"I3: version {version} is announced with weights that are not its own")
        if version > self.announced and not self.disk.behind and recover(self.disk)[0]["version"] < version:
            self.demand(f"I4: version {version} is announced before it is on disk")
        self.announced = max(version, self.announced)

    def restarted(self) -> None:
        """Check what a restarted coordinator loads. Only what could not be written to a full disk may be lost."""
        state, _, theta, _ = recover(self.disk)
        version = int(state["version"])
        lost = self.announced > version
        if lost and not self.disk.behind:
            self.demand(f"I4: version {self.announced} was announced, the disk holds version {version}")
        if self.history.get(version) != theta or self.tokens.get(version) != state["tokens"]:
            self.demand(f"I7: the disk holds another version {version} than was made")
        if lost:
            self.losses += 1
            self.report.counts["announced commits lost to a full disk"] += self.announced - version
        self.announced = min(self.announced, version)
        missed = [made for made in self.units if self.version < made <= version]  # made, but not announced before death
        self.report.committed.extend(missed)
        self.version = version
        self.counted = {unit for made, units in self.units.items() if made <= version for unit in units}
        self.disk.behind = False


def units_wrong(header: Mapping[str, Any], counted: Sequence[int], *, wanted: tuple[int, ...]) -> str:
    """`wanted`: the units of the round."""
    version, units = header["version"], wanted
    if tuple(header["units"]) != units:
        return f"I6: version {version} is made of units {header['units']}"
    if sorted([*counted, *header["skipped"]]) != list(units):
        return f"I1: version {version} counts units {sorted(counted)} and skips {header['skipped']}"
    return ""


def skipped_without_reason(skipped: Sequence[int], bad_answers: Mapping[int, int]) -> str:
    innocent = [unit for unit in skipped if bad_answers.get(unit, 0) < 2]
    return f"I1: units {innocent} are skipped, and did not fail twice" if innocent else ""
