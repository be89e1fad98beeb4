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
        """Lease a free lane to each idle member: the largest to the fastest."""
        idle, free, actions = work.idle(), work.ledger.free, list[Action]()
        lanes = sorted((lane for lane in self.lanes(work) if free.issuperset(lane)), key=len, reverse=True)
        if not idle or not lanes:
            return self._again(work, idle)
        for worker in idle:
            if able := [lane for lane in lanes if work.failed_by(worker).isdisjoint(lane)]:
                lanes.remove(able[0])
                actions += work.grant(worker, able[0])
        if not work.ledger.leases:  # every idle member failed these lanes: try once more
            actions += work.grant(idle[0], lanes[0])
        return actions

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
