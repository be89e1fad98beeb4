"""Finds contributions that look wrong although every number in them is finite. They are computed again.

In an update that the guard doubts, these are the contributions that are far larger than the others. One that looks the
same when another worker has computed it is right: it counts, no worker is to blame, and the guard judges the update.
"""

from collections.abc import Callable, Sequence

from cuadrilla.messages import Message
from cuadrilla.sync import events
from cuadrilla.sync.merge import Merger, Reduced, outliers

NON_FINITE, OUTLIER = Message("non-finite"), Message("outlier")


class Suspects:
    """Suspects among the contributions to the version that is being made. `event` writes an event of the run.

    `confirmed`: units of leases that looked wrong, and did so again when another worker had computed them.
    """

    def __init__(self, *, merge: Merger, event: Callable[..., None]) -> None:
        self._merge = merge
        self._event = event
        self._seen: set[tuple[int, ...]] = set()
        self.confirmed: set[int] = set()

    def forget(self) -> None:
        """A version is made: the next one has other units."""
        self._seen.clear()
        self.confirmed.clear()

    def find(self, action: events.Merge, reduced: Reduced, *, is_doubted: bool) -> tuple[Sequence[int], Message]:
        """Indices of the contributions that are computed again, and why: non-finite ones, or in an update that
        `is_doubted` outliers whose units did not look so before.

        Units that looked so before are confirmed, with the other units of their first lease: a lease is computed again
        one unit at a time, and one large unit makes the sum over the lease large.
        """
        if reduced.bad or not is_doubted:
            return reduced.bad, NON_FINITE
        units = {index: action.answers[index].grant.units for index in outliers(self._merge.norms(action.answers))}
        again = {unit for leased in self._seen for unit in leased}
        doubtful = [index for index in units if not again.issuperset(units[index])]
        repeated = {unit for index in set(units).difference(doubtful) for unit in units[index]}
        self.confirmed.update(*(leased for leased in self._seen if not repeated.isdisjoint(leased)))
        self._seen.update(units[index] for index in doubtful)
        if repeated and not doubtful:
            self._event("confirmed", what=OUTLIER, version=action.version, units=sorted(repeated))
        return doubtful, OUTLIER
