"""Contributions that look wrong although every number in them is finite: which of an update are computed again.

All-zero gradients beside others that are none, and in a strange update those that are beyond comparison with the
others'. What looks the same when another worker has computed it is right: it counts, nobody is to blame, and the guard
judges the update.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from cuadrilla.messages import Message
from cuadrilla.sync import events
from cuadrilla.sync.strategy import MergeHalf, Reduced, outliers

NON_FINITE, ZERO, OUTLIER = Message("non-finite"), Message("all-zero gradient"), Message("outlier")


class Suspects:
    """Contributions to the version that is being made; `event` writes one down.

    `confirmed`: units of leases that looked wrong and do so again now that another worker has computed them.
    """

    def __init__(self, *, merge: MergeHalf, event: Callable[..., None]) -> None:
        self._merge = merge
        self._event = event
        self._seen: defaultdict[Message, set[tuple[int, ...]]] = defaultdict(set)
        self.confirmed: set[int] = set()

    def forget(self) -> None:
        """A version is made: the next one has other units."""
        self._seen.clear()
        self.confirmed.clear()

    def find(self, action: events.Merge, reduced: Reduced, *, is_doubted: bool) -> tuple[Sequence[int], Message]:
        """The contributions, by number, that are computed again, and why: non-finite ones, and of the all-zero ones and
        in an update that `is_doubted` of those of a strange size what nobody has computed again yet.
        """
        if reduced.bad:
            return reduced.bad, NON_FINITE
        if zero := self._unconfirmed(action, self._merge.without_effect(action.answers), ZERO):
            return zero, ZERO
        strange = outliers(self._merge.norms(action.answers)) if is_doubted else ()
        return self._unconfirmed(action, strange, OUTLIER), OUTLIER

    def _unconfirmed(self, action: events.Merge, found: Sequence[int], what: Message) -> list[int]:
        """Those of `found` whose units did not look so before; what did is confirmed, with all that it was leased with.

        A lease is computed again one unit at a time, and one large unit makes the sum of all of them large.
        """
        seen, units = self._seen[what], {index: action.answers[index].grant.units for index in found}
        again = {unit for leased in seen for unit in leased}
        doubtful = [index for index in found if not again.issuperset(units[index])]
        repeated = {unit for index in set(found).difference(doubtful) for unit in units[index]}
        self.confirmed.update(*(leased for leased in seen if not repeated.isdisjoint(leased)))
        seen.update(units[index] for index in doubtful)
        if repeated and not doubtful:
            self._event("confirmed", what=what, version=action.version, units=sorted(repeated))
        return doubtful
