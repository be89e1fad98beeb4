"""The lease ledger: which unit of the run is free, leased, or counted.

    free ──grant──▶ leased(worker) ──count──▶ counted
      ▲                  │
      └────release───────┘

A run is an endless sequence of units 0, 1, 2, ...; `Ledger` opens them in order and remembers only those that are
not yet counted below the last counted one. Invariants (I1 of the fault tests): a unit is counted exactly once; it is
never leased twice at the same time; an answer to a lease that was released is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Grant:
    """`version`: of the weights that the units are computed from."""

    lease_id: int
    worker: str
    units: tuple[int, ...]
    version: int = 0


@dataclass(kw_only=True)
class Ledger:
    """`opened`: units below it exist. `free` and `leases` partition the opened units that are not counted."""

    opened: int = 0
    next_lease_id: int = 1
    free: set[int] = field(default_factory=set)
    leases: dict[int, Grant] = field(default_factory=dict)

    def open_units(self, count: int) -> None:
        """Put the next `count` units of the run on offer."""
        self.free.update(range(self.opened, self.opened + count))
        self.opened += count

    def grant(self, worker: str, count: int, *, version: int = 0, exclude: Iterable[int] = ()) -> Grant | None:
        """Lease the first `count` free units to a worker, none of `exclude`; None if there is none."""
        units = tuple(sorted(self.free.difference(exclude))[:count])
        if not units:
            return None
        lease = Grant(lease_id=self.next_lease_id, worker=worker, units=units, version=version)
        self.next_lease_id += 1
        self.free.difference_update(units)
        self.leases[lease.lease_id] = lease
        return lease

    def count(self, lease_id: int, *, worker: str) -> Grant | None:
        """The lease is answered: its units are counted. None for a late, repeated or foreign answer."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.worker != worker:
            return None
        return self.leases.pop(lease_id)

    def release(self, worker: str) -> list[Grant]:
        """Everything the worker holds is free again."""
        released = [lease for lease in self.leases.values() if lease.worker == worker]
        for lease in released:
            del self.leases[lease.lease_id]
            self.free.update(lease.units)
        return released

    def uncount(self, units: Iterable[int]) -> None:
        """A counted contribution turned out to be unusable: its units are free again."""
        self.free.update(units)

    def skip(self, units: Iterable[int]) -> None:
        """Free units that nobody can compute are counted as empty."""
        self.free.difference_update(units)

    @property
    def outstanding(self) -> int:
        """Opened units that are not counted."""
        return len(self.free) + sum(len(lease.units) for lease in self.leases.values())

    def snapshot(self) -> dict[str, Any]:
        """Leases do not survive a restart: their units are written as free."""
        held = {unit for lease in self.leases.values() for unit in lease.units}
        return {"opened": self.opened, "next_lease_id": self.next_lease_id, "free": sorted(self.free | held)}

    @staticmethod
    def redone(state: Mapping[str, Any], units: Iterable[int]) -> dict[str, Any]:
        """The snapshot that follows `state` when a version of these units was committed."""
        units = set(units)
        opened = max(state["opened"], max(units) + 1)
        free = {*state["free"], *range(state["opened"], opened)} - units
        return {"opened": opened, "next_lease_id": state["next_lease_id"], "free": sorted(free)}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "Ledger":
        return cls(opened=state["opened"], next_lease_id=state["next_lease_id"], free=set(state["free"]))
