"""Contributions that may be wrong although every number in them is finite: which of an update are computed again.

All-zero gradients beside others that are none, contributions of a strange update that are beyond comparison with the
others', and now and then one that is computed here, too (`referee.py`). What looks as strange when another has computed
it is right: it counts, whoever computed it and in whatever shares, and the guard judges the update.
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
from cuadrilla.train.referee import NORM_RATIO, Referee

GRADIENT_RATIO, LOSS_RATIO = 100.0, 10.0
"""Per token, between the contributions of one update, before anything is known of the run."""

log = logging.getLogger(__name__)


class Suspects:
    """Of one run. `referee`: where workers are not to be believed in everything; `event` writes one down.

    `blameless`: units of the version that is being made whose first contribution looked wrong and was right.
    """

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
        self.blameless: set[int] = set()
        self._zero_units: set[int] = set()
        self._outlying: dict[tuple[int, ...], float] = {}

    def forget(self) -> None:
        """A version is made: the next one has other units."""
        self.blameless.clear()
        self._zero_units.clear()
        self._outlying.clear()

    def zeros(self, action: events.Merge, contributions: Sequence[Contribution]) -> list[int]:
        """All-zero contributions that are to be computed again. Those that were are right."""
        zero = {index: action.answers[index].grant.units for index in self._merge.zeros(contributions)}
        doubtful = [index for index, units in zero.items() if not self._zero_units.issuperset(units)]
        confirmed = {unit for index in zero.keys() - doubtful for unit in zero[index]}
        self._zero_units.update(*(zero[index] for index in doubtful))
        self.blameless |= confirmed
        if confirmed and not doubtful:
            self._event("all-zero gradient confirmed", version=action.version, units=sorted(confirmed))
        return doubtful

    def outliers(self, action: events.Merge, contributions: Sequence[Contribution]) -> list[int]:
        """Contributions of a strange update that are beyond comparison with the others', or with what is right.

        An asynchronous one has no others beside it: another worker computes it again, and it is skipped if it is
        strange then, too.
        """
        if action.staleness is not None:
            return [0] if self._guard.is_warm and len(self._crew.members) > 1 else []
        if self.referee is None or is_crowd(action) or len(self._crew.members) < 2:
            return self._outliers_of_many(action, contributions)
        sizes = self._merge.sizes(contributions)
        losses = [abs(item.loss_sum) / max(item.tokens, 1) for item in contributions]
        if not (self._guard.is_warm or _differ(sizes, GRADIENT_RATIO) or _differ(losses, LOSS_RATIO)):
            return []
        indices = [index for index, item in enumerate(contributions) if item.tokens]
        suspects = {max(indices, key=sizes.__getitem__), min(indices, key=sizes.__getitem__)}
        suspects.add(max(indices, key=losses.__getitem__))
        return [index for index in sorted(suspects) if self._is_wrong(action, index, contributions[index])]

    def _outliers_of_many(self, action: events.Merge, contributions: Sequence[Contribution]) -> list[int]:
        """Beyond comparison with the others', and nobody has found so before; or this machine finds something else."""
        sizes = self._merge.sizes(contributions)
        known = {unit for units in self._outlying for unit in units}
        doubtful, confirmed = [], set[int]()
        for index in outliers(sizes):
            units = action.answers[index].grant.units
            if not known.issuperset(units):
                self._outlying[units] = sizes[index] * contributions[index].tokens
                doubtful.append(index)
            elif self.referee is not None and self._is_wrong(action, index, contributions[index]):
                doubtful.append(index)
            else:
                confirmed.update(units)
        if confirmed and not doubtful:
            self._event("outlier confirmed", version=action.version, units=sorted(confirmed))
        if not doubtful:
            self._excuse(action, contributions, sizes)
        return doubtful

    def _excuse(self, action: events.Merge, contributions: Sequence[Contribution], sizes: Sequence[float]) -> None:
        """Who has sent no more than what the parts are now found to amount to is not to blame.

        A sum's norm is at most the sum of the norms.
        """
        for units, norm in self._outlying.items():
            parts = [index for index, answer in enumerate(action.answers) if set(answer.grant.units) <= set(units)]
            if norm <= NORM_RATIO * sum(sizes[index] * contributions[index].tokens for index in parts):
                self.blameless.update(units)

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
