"""The lease ledger: which unit of the run is free, leased, or counted.

    free ──grant──▶ leased(worker, ...) ──count──▶ counted
      ▲                  │
      └──release, revoke───┘

A run is an endless sequence of units 0, 1, 2, ...; `Ledger` opens them in order and remembers only those that are
opened and not counted. A unit may be leased to several workers at once, when the first of them is late: whose answer
comes first counts. Invariants (I1 of the fault tests): a unit is counted exactly
once; an answer to a lease that was released, or one of whose units was counted meanwhile, is refused.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Grant:
    """`version`: of the weights that the units are computed from. `at`: when, by the coordinator's clock."""

    lease_id: int
    worker: str
    units: tuple[int, ...]
    version: int = 0
    at: float = 0.0


@dataclass(kw_only=True)
class Ledger:
    """`opened`: units below it exist; `uncounted` are those of them that are not counted, and `leases` hold some.
    `next_lease_id`: `train/setup.py` makes it a random number, so that no process gives out those of an earlier one.
    """

    opened: int = 0
    next_lease_id: int = 1
    uncounted: set[int] = field(default_factory=set)
    leases: dict[int, Grant] = field(default_factory=dict)

    @property
    def free(self) -> set[int]:
        """What is neither counted nor leased."""
        return self.uncounted.difference(*(lease.units for lease in self.leases.values()))

    def open_units(self, count: int) -> None:
        """Put the next `count` units of the run on offer."""
        self.uncounted.update(range(self.opened, self.opened + count))
        self.opened += count

    def grant(self, worker: str, units: Iterable[int], *, version: int = 0, at: float = 0.0) -> Grant:
        """Lease these units, one at least, which another worker may hold as well."""
        chosen = tuple(sorted(units))
        assert chosen
        assert self.uncounted.issuperset(chosen)
        lease = Grant(lease_id=self.next_lease_id, worker=worker, units=chosen, version=version, at=at)
        self.next_lease_id += 1
        self.leases[lease.lease_id] = lease
        return lease

    def count(self, lease_id: int, *, worker: str) -> Grant | None:
        """The lease is answered: its units are counted. None if it has ended, or is another worker's."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.worker != worker:
            return None
        self.uncounted.difference_update(lease.units)
        return self.leases.pop(lease_id)

    def revoke(self, units: Iterable[int]) -> list[Grant]:
        """These units were just counted: end every other lease that holds one. Its other units become free."""
        counted = set(units)
        ended = [lease for lease in self.leases.values() if not counted.isdisjoint(lease.units)]
        for lease in ended:
            del self.leases[lease.lease_id]
        return ended

    def held_by_one(self) -> set[int]:
        """Units that one worker holds, and no other."""
        holders = Counter(unit for lease in self.leases.values() for unit in lease.units)
        return {unit for unit, number in holders.items() if number == 1}

    def held_by(self, worker: str) -> list[Grant]:
        """The oldest first."""
        return [lease for lease in self.leases.values() if lease.worker == worker]

    def release(self, worker: str) -> list[Grant]:
        """Nothing that the worker holds is expected of it any more."""
        released = self.held_by(worker)
        for lease in released:
            del self.leases[lease.lease_id]
        return released
