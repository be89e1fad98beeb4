"""Rounds of strict windows: a window is cut into fixed lanes, so the leases are the same for any crew.

A lane is `lanes[i]` units in each of the window's steps. Any worker can compute any lane, from the state of record and
the lane's units alone. The merge adds lanes in their order, so one machine that computes them one after the other gives
the same bits as a crew. A lost lane is computed again by another worker.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cuadrilla.sync.events import Action, Late
from cuadrilla.sync.ledger import Grant
from cuadrilla.sync.work import Rounds, Work


def cut_lanes(units_per_step: int, *, sizes: Sequence[float]) -> tuple[int, ...]:
    """Units per step of each lane, in proportion to `sizes` and rounded to whole units; empty lanes are left out."""
    ends = [0, *(round(units_per_step * sum(sizes[: i + 1]) / sum(sizes)) for i in range(len(sizes)))]
    return tuple(end - begin for begin, end in itertools.pairwise(ends) if end > begin)


@dataclass(frozen=True, kw_only=True)
class LaneRounds(Rounds):
    """Like `Rounds`, but a lease is a whole lane. `sizes`: the relative sizes of the lanes."""

    sizes: Sequence[float]

    def deal(self, work: Work) -> list[Action]:
        """Plan each free lane, the largest first, for the member that finishes it soonest; lease to those now idle."""
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
        return [action for worker in idle if worker in chosen for action in work.grant(worker, chosen[worker])]

    def is_smallest(self, grant: Grant, work: Work) -> bool:
        """Always: a lane is never split, or the bits would depend on who computed it."""
        del grant, work
        return True

    def lanes(self, work: Work) -> list[range]:
        """The units of each lane of the open round."""
        steps, first, found = work.steps, work.version * work.rules.units_per_step, list[range]()
        for size in cut_lanes(work.rules.units_per_step, sizes=self.sizes):
            found.append(range(first, first + steps * size))
            first += steps * size
        return found

    def _again(self, work: Work, idle: Sequence[str]) -> list[Action]:
        """Lease late lanes to idle members, too, when no lane is free."""
        once, granted = work.ledger.held_by_one(), list[Action]()
        late = [lease for lease in work.late() if once.issuperset(lease.units)]
        for worker, lease in zip(idle, late, strict=False):
            granted += [Late(worker=lease.worker, lease_id=lease.lease_id), *work.grant(worker, lease.units)]
        return granted


def _seconds_to_ready(work: Work) -> dict[str, float]:
    """Seconds until each member has answered its leases. A late lease counts as needing as long again as it is late."""
    ready = dict.fromkeys(work.crew.members, 0.0)
    for lease in work.ledger.leases.values():
        expected = work.crew.paces()[lease.worker].seconds(len(lease.units))
        ready[lease.worker] += abs(expected - (work.crew.now - lease.at))
    return ready
