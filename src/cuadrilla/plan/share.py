"""Shares whole units among workers of unequal speed so that all finish at about the same time."""

import math
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

    The shares add up to `num_units`. Ties go to the faster worker, then to the alphabetically first, so that equal
    inputs give equal shares everywhere.
    """
    paces = {worker: pace for worker, pace in paces.items() if pace.units_per_second > 0}
    if not paces:
        return {}
    finish = finish_seconds(num_units, paces=paces)
    shares = {
        worker: max(0, math.floor((finish - pace.fixed_seconds) * pace.units_per_second - 1e-9))
        for worker, pace in paces.items()
    }
    for _ in range(num_units - sum(shares.values())):
        next_one = [
            (pace.seconds(shares[worker] + 1), -pace.units_per_second, worker) for worker, pace in paces.items()
        ]
        shares[min(next_one)[2]] += 1
    return shares


def finish_seconds(num_units: float, *, paces: Mapping[str, Pace]) -> float:
    """When all would be done if units could be divided. A worker whose transfers alone take longer gets no share."""
    speed = begun = 0.0
    finish = math.inf
    for pace in sorted(paces.values(), key=lambda pace: pace.fixed_seconds):
        if pace.fixed_seconds >= finish:
            break
        speed += pace.units_per_second
        begun += pace.fixed_seconds * pace.units_per_second
        finish = (num_units + begun) / speed
    return finish
