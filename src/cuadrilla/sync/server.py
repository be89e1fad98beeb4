"""The asynchronous parameter server: each contribution makes the next version on its own, on arrival.

    worker:  θ(v) and a lease of a whole update batch → gradient at θ(v)     the worker half of `sync/exact.py`
    merge:   θ(u + 1) = step(θ(u), that gradient), u ≥ v                     its merge half, one contribution at a time
             θ(u + 1) and the next lease to that worker only

A version is made of the units of one lease, so the number of versions, the schedule, evaluations and the global batch
are those of the exact strategy, and every worker contributes at its own speed. Alone it is the exact strategy, bit for
bit. With several workers the order of arrival decides the weights: nothing here is reproducible, and there is no
strict mode.

The staleness of an answer is the number of versions committed since its lease was granted, u − v. It is bounded as
in stale synchronous parallel training (Ho et al., NIPS 2013), such that no finished work is thrown away:

* A batch is leased only if the age of the oldest lease outstanding, plus the number of batches that are out, is at most
  `staleness`; those who may not go on wait for the slowest. If that one is late, one of them gets its batch, too.
* Age of the oldest + number of the others then never exceeds the bound: an answer makes the ages one larger and the
  number one smaller. So even if all others answer first, the last one is within it.

So at most `staleness` + 1 members work at a time, and k equal ones never wait for each other from 2 (k − 1) on.
A lost worker's batch is the next to be leased. A batch whose contribution is not finite is computed again by another
member if there is one, and skipped as bad data at the second time. A single contribution has no others to be compared
with: what is finite and wrong is left to the guard. After a rollback all outstanding leases are void: they were
computed from weights that are given up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from cuadrilla.errors import TaskError
from cuadrilla.sync.events import Action, Late, Merge, Merged
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.ledger import Grant
from cuadrilla.sync.statistics import batch_norms
from cuadrilla.sync.work import MAX_FAILURES_OF_A_UNIT, Rounds, Share, Work


@dataclass(frozen=True, kw_only=True)
class Server(Exact):
    """The strategy of `sync.kind = "server"`: the halves of the exact one, and other rounds."""

    max_staleness: int

    def rounds(self, *, share: Share) -> Rounds:
        del share  # a lease is a whole batch
        return LeaseRounds(staleness=self.max_staleness)

    def check(self, model: nn.Module, *, several_workers: bool) -> None:
        running = list(batch_norms(model))
        if running and several_workers:
            raise TaskError(
                "{name} keeps running statistics, which asynchronous workers do not share",
                name=running[0],
                hint='use one worker, sync.kind = "exact", or a normalisation without them (LayerNorm, GroupNorm)',
            )


@dataclass(frozen=True, kw_only=True)
class LeaseRounds:
    """A round for each lease; see the module. It gathers nobody: who comes first begins."""

    staleness: int

    def welcome(self, work: Work, worker: str) -> list[Action]:
        """A version comes with a lease, so that it is the newest. Newcomers stand before all others."""
        work.crew.stand_first(worker)
        return []

    def deal(self, work: Work) -> list[Action]:
        """A batch for each idle member as far as the bound allows; whose last one was granted longest ago first."""
        if work.merging is not None or work.answers or work.skipped:
            return []
        actions: list[Action] = []
        for worker in work.idle():
            if self.may_grant(work):
                actions.extend(self._grant_batch(work, worker))
        return actions or self._share_late(work, work.idle())

    def may_grant(self, work: Work) -> bool:
        """Whether one more batch may go out."""
        leases = work.ledger.leases.values()
        oldest = max((work.version - lease.version for lease in leases), default=0)
        return oldest + len({lease.units for lease in leases}) <= self.staleness

    def _grant_batch(self, work: Work, worker: str) -> list[Action]:
        """What came back goes out first; a batch is opened when there is none, and never more than the run has."""
        size, failed = work.rules.units_per_round, work.failed_by(worker)
        if not work.ledger.free - failed and work.ledger.opened < size * work.rules.num_versions:
            work.ledger.open_units(size)
        return _with_version(work, worker, work.grant(worker, size, exclude=failed))

    def _share_late(self, work: Work, idle: Sequence[str]) -> list[Action]:
        """A late batch is leased to one of those who wait for it: computed from the newest weights, it may be first."""
        once = work.ledger.held_once()
        for lease in work.late():
            for worker in idle:
                if once.issuperset(lease.units) and work.failed_by(worker).isdisjoint(lease.units):
                    again = _with_version(work, worker, work.grant_again(worker, lease.units))
                    return [Late(worker=lease.worker, lease_id=lease.lease_id), *again]
        return []

    def fail(self, work: Work, grant: Grant) -> None:
        """The whole batch is computed again, and skipped at the second time."""
        work.failed(grant)
        if len(work.failures[grant.units[0]]) >= MAX_FAILURES_OF_A_UNIT:
            work.skip(grant.units)

    def due(self, work: Work) -> Merge | None:
        if not (work.answers or work.skipped):
            return None
        granted_at = [answer.grant.version for answer in work.answers.values()]
        return work.merge(staleness=work.version - min(granted_at, default=work.version))

    def next(self, work: Work, event: Merged) -> list[Action]:
        if event.rolled_back:
            for worker in work.crew.members:
                work.ledger.release(worker)
        return []


def _with_version(work: Work, worker: str, leased: list[Action]) -> list[Action]:
    """The newest version goes before a lease, and who got it stands behind all others."""
    if not leased:
        return []
    work.crew.stand_last(worker)
    return [work.tell_version(worker), *leased]
