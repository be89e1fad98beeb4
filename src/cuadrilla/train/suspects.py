"""Contributions that look wrong although every number in them is finite: which of an update are computed again.

In a strange update those that are beyond comparison with the others'. What looks the same when another worker has
computed it is right: it counts, nobody is to blame, and the guard judges the update.
"""

from collections.abc import Callable, Sequence

from cuadrilla.messages import Message
from cuadrilla.sync import events
from cuadrilla.sync.strategy import MergeHalf, Reduced, outliers

NON_FINITE, OUTLIER = Message("non-finite"), Message("outlier")


class Suspects:
    """Contributions to the version that is being made; `event` writes one down.

    `confirmed`: units of leases that looked wrong and do so again now that another worker has computed them.
    """

    def __init__(self, *, merge: MergeHalf, event: Callable[..., None]) -> None:
        self._merge = merge
        self._event = event
        self._seen: set[tuple[int, ...]] = set()
        self.confirmed: set[int] = set()

    def forget(self) -> None:
        """A version is made: the next one has other units."""
        self._seen.clear()
        self.confirmed.clear()

    def find(self, action: events.Merge, reduced: Reduced, *, is_doubted: bool) -> tuple[Sequence[int], Message]:
        """The contributions, by number, that are computed again, and why: non-finite ones, and in an update that
        `is_doubted` those of a strange size whose units did not look so before.

        What did is confirmed, with all that it was leased with: a lease is computed again one unit at a time, and one
        large unit makes the sum of all of them large.
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
