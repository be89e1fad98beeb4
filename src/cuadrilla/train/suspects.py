"""Contributions that may be wrong although every number in them is finite: which of an update are computed again.

All-zero gradients beside others that are none, contributions of a strange update that are beyond comparison with the
others', and now and then one that is computed here, too (`referee.py`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from cuadrilla.link.base import Contribution
from cuadrilla.link.names import node_of
from cuadrilla.sync import events
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.strategy import MergeHalf, outliers
from cuadrilla.train.guard import Guard
from cuadrilla.train.referee import Referee

GRADIENT_RATIO, LOSS_RATIO = 100.0, 10.0
"""Per token, between the contributions of one update, before anything is known of the run."""

log = logging.getLogger(__name__)


class Suspects:
    """Of one run. `referee`: where workers are not to be believed in everything; `event` writes one down."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        merge: MergeHalf,
        guard: Guard,
        referee: Referee | None,
        event: Callable[..., None],
    ) -> None:
        self.referee = referee
        self._crew = coordinator.crew
        self._merge = merge
        self._guard = guard
        self._event = event
        self._zero_units: set[int] = set()

    def forget(self) -> None:
        """A version is made: the next one has other units."""
        self._zero_units.clear()

    def zeros(self, action: events.Merge, contributions: Sequence[Contribution]) -> tuple[list[int], set[int]]:
        """All-zero contributions that are to be computed again, and the units of those that were: they are right."""
        doubtful: list[int] = []
        confirmed: set[int] = set()
        for index in self._merge.zeros(contributions):
            units = action.answers[index].grant.units
            if self._zero_units.issuperset(units):
                confirmed.update(units)
            else:
                doubtful.append(index)
        for index in doubtful:
            self._zero_units.update(action.answers[index].grant.units)
        if confirmed and not doubtful:
            self._event("all-zero gradient confirmed", version=action.version, units=sorted(confirmed))
        return doubtful, confirmed

    def outliers(self, action: events.Merge, contributions: Sequence[Contribution]) -> list[int]:
        """Contributions of a strange update that are beyond comparison with the others', or with what is right.

        An asynchronous one has no others beside it: another worker computes it again, and it is skipped if it is
        strange then, too.
        """
        if action.staleness is not None:
            return [0] if self._guard.is_warm and len(self._crew.members) > 1 else []
        if self.referee is None or is_crowd(action) or len(self._crew.members) < 2:
            return list(outliers(self._merge.sizes(contributions)))
        sizes = self._merge.sizes(contributions)
        losses = [abs(item.loss_sum) / max(item.tokens, 1) for item in contributions]
        if not (self._guard.is_warm or _differ(sizes, GRADIENT_RATIO) or _differ(losses, LOSS_RATIO)):
            return []
        indices = [index for index, item in enumerate(contributions) if item.tokens]
        suspects = {max(indices, key=sizes.__getitem__), min(indices, key=sizes.__getitem__)}
        suspects.add(max(indices, key=losses.__getitem__))
        return [index for index in sorted(suspects) if self._is_wrong(action, index, contributions[index])]

    def _is_wrong(self, action: events.Merge, index: int, said: Contribution) -> bool:
        assert self.referee is not None
        grant = action.answers[index].grant
        return _is_found(self.referee.finds(said, grant.units), worker=grant.worker)

    def audited(self, action: events.Merge, contributions: Sequence[Contribution]) -> list[int]:
        """Now and then one contribution is computed here, too; it, if it is wrong."""
        if self.referee is None or len(self._crew.members) < 2:
            return []
        units = [answer.grant.units for answer in action.answers]
        workers, paces = [answer.grant.worker for answer in action.answers], self._crew.paces()
        seconds = [paces[name].seconds(len(of)) for name, of in zip(workers, units, strict=True) if name in paces]
        if not self.referee.is_due(max(seconds, default=0.0)):
            return []
        index, found, took = self.referee.audit(contributions, units)
        self._event("audited", worker=workers[index], units=units[index], seconds=round(took, 3), found=found)
        return [index] if _is_found(found, worker=workers[index]) else []


def is_crowd(action: events.Merge) -> bool:
    """Whether there are enough to compare: no node is half of them or more."""
    workers = {answer.grant.worker for answer in action.answers}
    return 2 * max(Counter(map(node_of, workers)).values(), default=0) < len(workers)


def _is_found(difference: str, *, worker: str) -> bool:
    """Whether the referee has found something; says so."""
    if difference:
        log.warning("this machine does not get the result that %s sent: %s", worker, difference)
    return bool(difference)


def _differ(values: Sequence[float], ratio: float) -> bool:
    """Whether the largest positive value is this many times the smallest."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > ratio * min(positive)
