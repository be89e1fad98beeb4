"""Share whole units among workers of unequal speed, so that all finish at about the same time."""

from collections.abc import Mapping


def share_units(num_units: int, *, speeds: Mapping[str, float]) -> dict[str, int]:
    """Units for each worker, in proportion to its speed (units per second): the largest-remainder method.

    The shares add up to `num_units`; ties go to the faster worker, then to the lesser name, so that equal inputs
    give equal shares everywhere. A worker may get none. Minimises nothing but rounding: with unequal fixed costs
    per worker `plan/predict` corrects the speeds it is given.
    """
    total = sum(speeds.values())
    if not speeds or total <= 0:
        return dict.fromkeys(speeds, 0)
    exact = {worker: num_units * speed / total for worker, speed in speeds.items()}
    shares = {worker: int(quota) for worker, quota in exact.items()}
    left = num_units - sum(shares.values())
    by_remainder = sorted(speeds, key=lambda worker: (shares[worker] - exact[worker], -speeds[worker], worker))
    for worker in by_remainder[:left]:
        shares[worker] += 1
    return shares
