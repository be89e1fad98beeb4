"""The number of times that a job is tried, and the machine that gets none for a while. No I/O, no clock.

Invariants
* A machine that fails a job does not fail it for all: it is tried once more. One that is lost is no failure of its job,
  unless that happens again and again.
* A machine on which one job after the other ends badly rests, longer each time: it does not use up all jobs.
* A machine that gets further with a job, or finishes one, begins anew.
"""

from collections import Counter

MAX_FAILURES = 2
MAX_LOSSES = 10
"""Machines that had a job and got no further with it: then it counts as failed."""
PATIENT_WITH = 2
"""Jobs in a row that may end badly on a machine before it rests."""
FIRST_REST_SECONDS, MAX_REST_SECONDS = 15.0, 600.0


class Retries:
    """Counts by the names of jobs and machines. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._rests_until: dict[str, float] = {}

    def failed(self, job: str, *, worker: str, now: float) -> bool:
        """Whether the job counts as failed by now."""
        return self._count(self._failures, job, worker, most=MAX_FAILURES, now=now)

    def lost(self, job: str, *, worker: str, now: float) -> bool:
        """Whether the job, whose machine is gone, counts as failed by now."""
        return self._count(self._losses, job, worker, most=MAX_LOSSES, now=now)

    def _count(self, ended: Counter[str], job: str, worker: str, *, most: int, now: float) -> bool:
        self.ended_badly(worker, now=now)
        ended[job] += 1
        if ended[job] < most:
            return False
        del ended[job]
        return True

    def got_further(self, job: str, *, worker: str) -> None:
        """Or has finished it."""
        for kept in (self._failures, self._losses):
            kept.pop(job, None)
        self._bad.pop(worker, None)
        self._rests_until.pop(worker, None)

    def ended_badly(self, worker: str, *, now: float) -> None:
        self._bad[worker] += 1
        over = self._bad[worker] - PATIENT_WITH
        if over > 0:
            self._rests_until[worker] = now + min(FIRST_REST_SECONDS * 2 ** min(over - 1, 10), MAX_REST_SECONDS)

    def rest_seconds(self, worker: str, *, now: float) -> float:
        """The time for which a machine gets no job; 0: it may have one."""
        return max(0.0, self._rests_until.get(worker, now) - now)
