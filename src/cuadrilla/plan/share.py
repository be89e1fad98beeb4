"""Shares whole units among workers of unequal speed so that all finish at about the same time."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a worker needs for its part of a round: `fixed_seconds` for transfers, and the time of its units."""

    units_per_second: float
    fixed_seconds: float = 0.0

    def seconds(self, num_units: int) -> float:
        return self.fixed_seconds + num_units / self.units_per_second


def share_units(num_units: int, *, paces: Mapping[str, Pace]) -> dict[str, int]:
    """Units for each worker, such that the last worker finishes as early as possible. A worker may get none.

    Each unit goes to the worker that would finish it first. Ties go to the faster worker, then to the alphabetically
    first, so that equal inputs give equal shares everywhere.
    """
    shares = dict.fromkeys(paces, 0)
    next_ends = [(pace.seconds(1), -pace.units_per_second, worker) for worker, pace in paces.items()]
    heapq.heapify(next_ends)
    for _ in range(num_units if paces else 0):
        _, speed, worker = next_ends[0]
        shares[worker] += 1
        heapq.heapreplace(next_ends, (paces[worker].seconds(shares[worker] + 1), speed, worker))
    return shares
