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

* A lease is granted only if the age of the oldest one outstanding, plus their number, is at most `rules.staleness`;
  those who may not go on wait for the slowest.
* Age of the oldest + number of the others then never exceeds the bound: an answer makes the ages one larger and the
  number one smaller. So even if all others answer first, the last one is within it.

So at most `staleness` + 1 members work at a time, and k equal ones never wait for each other from 2 (k − 1) on.
A lost worker's batch is the next to be leased. A batch whose contribution is not finite is computed again by another
member if there is one, and skipped as bad data at the second time. A single contribution has no others to be compared
with: what is finite and wrong is left to the guard. After a rollback all outstanding leases are void: they were
computed from weights that are given up.
"""

from cuadrilla.sync.coordinator import MAX_FAILURES_OF_A_UNIT, Coordinator
from cuadrilla.sync.events import Action, Merged, SendVersion
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
        busy = {lease.worker for lease in self.ledger.leases.values()}
        idle = [worker for worker in self.members if worker not in busy]
        actions: list[Action] = []
        for worker in idle:
            if self._may_grant():
                actions.extend(self._grant_batch(worker))
        return actions

    def _may_grant(self) -> bool:
        leases = self.ledger.leases.values()
        oldest = max((self.version - lease.version for lease in leases), default=0)
        return oldest + len(leases) <= self.rules.staleness

    def _grant_batch(self, worker: str) -> list[Action]:
        """What came back goes out first; a batch is opened when there is none, and never more than the run has."""
        size = self.rules.units_per_round
        failed = {unit for unit, workers in self.failures.items() if worker in workers and len(self.members) > 1}
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
