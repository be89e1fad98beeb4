"""The lease ledger: which worker holds which units.

    free ──grant──▶ leased(worker) ──take──▶ counted, with its answer (`work.py`)
      ▲                  │
      └────────end───────┘

Invariants (I1 of the fault tests): a unit is counted exactly once. An answer is refused if its lease has ended: its
worker was lost, or one of its units was counted meanwhile.
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
    """`leases`: by worker, each of which holds at most one. `next_lease_id` starts at a random number
    (`train/setup.py`), so that a restarted process repeats no number.
    """

    next_lease_id: int = 1
    leases: dict[str, Grant] = field(default_factory=dict)

    def grant(self, worker: str, units: Iterable[int], *, at: float) -> Grant:
        """Lease these units, which another worker may also hold, to a worker without a lease."""
        assert worker not in self.leases
        lease = Grant(lease_id=self.next_lease_id, worker=worker, units=tuple(sorted(units)), at=at)
        self.next_lease_id += 1
        self.leases[worker] = lease
        return lease

    def take(self, lease_id: int, *, worker: str) -> Grant | None:
        """End the lease that is answered, and return it. None if it has ended, or is another worker's."""
        lease = self.leases.get(worker)
        if lease is None or lease.lease_id != lease_id:
            return None
        return self.leases.pop(worker)

    def end(self, units: Iterable[int]) -> list[Grant]:
        """End all leases that hold one of these units. Their other units become free."""
        gone = set(units)
        ended = [lease for lease in self.leases.values() if gone.intersection(lease.units)]
        for lease in ended:
            del self.leases[lease.worker]
        return ended

    def held_by_one(self) -> set[int]:
        """Units that exactly one worker holds."""
        holders = Counter(unit for lease in self.leases.values() for unit in lease.units)
        return {unit for unit, number in holders.items() if number == 1}
