"""The lease ledger: which unit of the run is free, leased, or counted.

    free ──grant──▶ leased(worker, ...) ──count──▶ counted
      ▲                  │
      └────────end─────────┘

A run is an endless sequence of units 0, 1, 2, ... `Ledger` opens them in order, and remembers only open units that are
not counted. Invariants (I1 of the fault tests): a unit is counted exactly once. An answer is refused if its lease has
ended: its worker was lost, or one of its units was counted meanwhile.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A lease. `at`: when it was granted, by the coordinator's clock."""

    lease_id: int
    worker: str
    units: tuple[int, ...]
    at: float = 0.0


@dataclass(kw_only=True)
class Ledger:
    """`opened`: all units below this number were opened; `uncounted`: those of them that are not counted yet.
    `leases`: by worker, each of which holds at most one. `next_lease_id` starts at a random number (`train/setup.py`),
    so that a restarted process repeats no number.
    """

    opened: int = 0
    next_lease_id: int = 1
    uncounted: set[int] = field(default_factory=set)
    leases: dict[str, Grant] = field(default_factory=dict)

    @property
    def free(self) -> set[int]:
        """Open units that are neither counted nor leased."""
        return self.uncounted.difference(*(lease.units for lease in self.leases.values()))

    def open_units(self, count: int) -> None:
        self.uncounted.update(range(self.opened, self.opened + count))
        self.opened += count

    def grant(self, worker: str, units: Iterable[int], *, at: float) -> Grant:
        """Lease these units (at least one), which another worker may also hold, to a worker without a lease."""
        chosen = tuple(sorted(units))
        assert chosen
        assert worker not in self.leases
        assert self.uncounted.issuperset(chosen)
        lease = Grant(lease_id=self.next_lease_id, worker=worker, units=chosen, at=at)
        self.next_lease_id += 1
        self.leases[worker] = lease
        return lease

    def count(self, lease_id: int, *, worker: str) -> Grant | None:
        """End an answered lease and count its units. None if the lease has ended, or is another worker's."""
        lease = self.leases.get(worker)
        if lease is None or lease.lease_id != lease_id:
            return None
        self.uncounted.difference_update(lease.units)
        return self.leases.pop(worker)

    def end(self, units: Iterable[int]) -> list[Grant]:
        """End all leases that hold one of these units. Their uncounted units become free."""
        gone = set(units)
        ended = [lease for lease in self.leases.values() if gone.intersection(lease.units)]
        for lease in ended:
            del self.leases[lease.worker]
        return ended

    def held_by_one(self) -> set[int]:
        """Units that exactly one worker holds."""
        holders = Counter(unit for lease in self.leases.values() for unit in lease.units)
        return {unit for unit, number in holders.items() if number == 1}
