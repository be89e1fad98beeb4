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
  `rules.staleness`; those who may not go on wait for the slowest. If that one is late, one of them gets its batch, too.
* Age of the oldest + number of the others then never exceeds the bound: an answer makes the ages one larger and the
  number one smaller. So even if all others answer first, the last one is within it.

So at most `staleness` + 1 members work at a time, and k equal ones never wait for each other from 2 (k − 1) on.
A lost worker's batch is the next to be leased. A batch whose contribution is not finite is computed again by another
member if there is one, and skipped as bad data at the second time. A single contribution has no others to be compared
with: what is finite and wrong is left to the guard. After a rollback all outstanding leases are void: they were
computed from weights that are given up.
"""

from collections.abc import Sequence

from cuadrilla.sync.coordinator import MAX_FAILURES_OF_A_UNIT, Coordinator
from cuadrilla.sync.events import Action, Late, Merged, SendVersion
from cuadrilla.sync.ledger import Grant


class ServerCoordinator(Coordinator):
    """The coordinator with a round for each lease; see the module. It gathers nobody: who comes first begins."""

    def _welcome(self, worker: str) -> list[Action]:
        """A version comes with a lease, so that it is the newest. Newcomers stand before all others."""
        self.members = {worker: self.members.pop(worker), **self.members}
        return []

    def _deal(self) -> list[Action]:
        """A batch for each idle member as far as the bound allows; whose last one was granted longest ago first."""
        if self.merging is not None or self.answers or self.skipped or not self._has_gathered():
            return []
        actions: list[Action] = []
        for worker in self._idle():
            if self._may_grant():
                actions.extend(self._grant_batch(worker))
        return actions or self._share_late(self._idle())

    def _idle(self) -> list[str]:
        """Whose last batch was granted longest ago comes first."""
        busy = {lease.worker for lease in self.ledger.leases.values()}
        return [worker for worker in self.members if worker not in busy]

    def _may_grant(self) -> bool:
        leases = self.ledger.leases.values()
        oldest = max((self.version - lease.version for lease in leases), default=0)
        return oldest + len({lease.units for lease in leases}) <= self.rules.staleness

    def _share_late(self, idle: Sequence[str]) -> list[Action]:
        """A late batch is leased to one of those who wait for it: computed from the newest weights, it may be first."""
        once = self.ledger.held_once()
        late = [lease for lease in self.ledger.leases.values() if once.issuperset(lease.units) and self._is_late(lease)]
        for lease in late:
            for worker in idle:
                if self._failed_by(worker).isdisjoint(lease.units):
                    return [Late(worker=lease.worker, lease_id=lease.lease_id), *self._send_again(worker, lease.units)]
        return []

    def _send_again(self, worker: str, units: Sequence[int]) -> list[Action]:
        self.members[worker] = self.members.pop(worker)  # behind all others
        return [SendVersion(worker=worker, version=self.version), *super()._send_again(worker, units)]

    def _grant_batch(self, worker: str) -> list[Action]:
        """What came back goes out first; a batch is opened when there is none, and never more than the run has."""
        size, failed = self.rules.units_per_round, self._failed_by(worker)
        if not self.ledger.free - failed and self.ledger.opened < size * self.rules.num_versions:
            self.ledger.open_units(size)
        leased = self._grant(worker, size, exclude=failed)
        if not leased:
            return []
        self.members[worker] = self.members.pop(worker)  # behind all others
        return [SendVersion(worker=worker, version=self.version), *leased]

    def _fail(self, grant: Grant) -> None:
        """The whole batch is computed again, and skipped at the second time."""
        self.ledger.uncount(grant.units)
        for unit in grant.units:
            self.failures.setdefault(unit, []).append(grant.worker)
        if len(self.failures[grant.units[0]]) >= MAX_FAILURES_OF_A_UNIT:
            self.ledger.skip(grant.units)
            self.ledger.void(grant.units)
            self.skipped.update(grant.units)

    def _close_round(self) -> list[Action]:
        if self.merging is not None or not (self.answers or self.skipped):
            return []
        granted_at = [grant.version for _, grant in self.answers.values()]
        return [self._merge(staleness=self.version - min(granted_at, default=self.version))]

    def _next_round(self, event: Merged) -> list[Action]:
        if event.rolled_back:
            for worker in self.members:
                self.ledger.release(worker)
        return []
