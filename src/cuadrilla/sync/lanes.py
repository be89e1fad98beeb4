"""Rounds whose leases are the same for any crew: a window is cut into lanes before it is known who computes them.

A lane is `lanes[i]` units in each of the window's steps. Any worker computes any lane, from the state of record and
the lane's units alone, and the merge adds them up in their order; so one machine that computes lane after lane makes
the bits of the crew, and a lane that was lost is computed again elsewhere.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cuadrilla.sync.events import Action, Late
from cuadrilla.sync.ledger import Grant
from cuadrilla.sync.work import Rounds, Work


def cut_lanes(units_per_step: int, *, sizes: Sequence[float]) -> tuple[int, ...]:
    """Units of each lane in a step, as near to the relative `sizes` as whole numbers are; none is empty."""
    ends = [0, *(round(units_per_step * sum(sizes[: i + 1]) / sum(sizes)) for i in range(len(sizes)))]
    return tuple(end - begin for begin, end in itertools.pairwise(ends) if end > begin)


@dataclass(frozen=True, kw_only=True)
class LaneRounds(Rounds):
    """As `Rounds`, with a lane in place of a share. `sizes`: relative ones of the lanes."""

    sizes: Sequence[float]

    def deal(self, work: Work) -> list[Action]:
        """Lease each idle member the lane that it would finish first of all, the large ones first."""
        idle, free = work.idle(), work.ledger.free
        if not idle:
            return []
        lanes = [lane for lane in self.lanes(work) if free.issuperset(lane)]
        if not lanes:
            return self._again(work, idle)
        ready, paces, chosen = _seconds_to_ready(work), work.crew.paces(), dict[str, range]()
        for lane in sorted(lanes, key=len, reverse=True):
            able = [worker for worker in ready if work.failed_by(worker).isdisjoint(lane)] or list(ready)
            soonest = min(able, key=lambda worker: (ready[worker] + paces[worker].seconds(len(lane)), worker))
            ready[soonest] += paces[soonest].seconds(len(lane))
            chosen.setdefault(soonest, lane)
        return [action for worker in idle if worker in chosen for action in work.grant_units(worker, chosen[worker])]

    def is_smallest(self, grant: Grant, work: Work) -> bool:
        """A lane is skipped as a whole, or the bits would depend on who computed it."""
        del grant, work
        return True

    def lanes(self, work: Work) -> list[range]:
        """The lanes of the round that is open."""
        steps, first, found = work.steps, work.version * work.rules.units_per_step, list[range]()
        for size in cut_lanes(work.rules.units_per_step, sizes=self.sizes):
            found.append(range(first, first + steps * size))
            first += steps * size
        return found

    def _again(self, work: Work, idle: Sequence[str]) -> list[Action]:
        """All lanes are leased: late ones are leased to those who have nothing to do, too."""
        once, granted = work.ledger.held_by_one(), list[Action]()
        late = [lease for lease in work.late() if once.issuperset(lease.units)]
        for worker, lease in zip(idle, late, strict=False):
            granted += [Late(worker=lease.worker, lease_id=lease.lease_id), *work.grant_units(worker, lease.units)]
        return granted


def _seconds_to_ready(work: Work) -> dict[str, float]:
    """Until each member has answered what it holds; a late one is thought to stay so for as long again."""
    ready = dict.fromkeys(work.crew.members, 0.0)
    for lease in work.ledger.leases.values():
        expected = work.crew.paces()[lease.worker].seconds(len(lease.units))
        ready[lease.worker] += abs(expected - (work.crew.now - lease.at))
    return ready
