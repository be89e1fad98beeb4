"""When a job counts as failed, and which machine gets none for a while: by how it went so far. No I/O, no clock.

Invariants
* No machine fails a job alone at its first try: it may be the machine. Nor is what another machine has left thrown
  away for that: two have to fail with it, or one again and again.
* A machine on which one job after the other ends badly rests, longer each time: it does not use up all jobs.
* Who gets further with a job, or finishes one, begins anew.
"""

from collections import Counter
from enum import Enum

MAX_FAILURES = 2
MAX_LOSSES = 10
"""Of machines that had a job and got no further with it: then it counts as failed."""
ALONE_FAILURES = 6
"""Of one machine with what another has left."""
PATIENT_WITH = 2
"""Jobs in a row that may end badly on a machine before it rests."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 15.0, 600.0


class FailureMeans(Enum):
    """What a failure means. SET_ASIDE: what the newest checkpoint's machine has left cannot be used."""

    AGAIN = "again"
    SET_ASIDE = "set aside"
    FAILED = "failed"


class Standing:
    """Of jobs and machines, by name. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._failures: dict[str, list[str]] = {}
        self._losses: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._rests_until: dict[str, float] = {}

    def failed(self, job: str, *, worker: str, left_by: str | None, now: float) -> FailureMeans:
        """`left_by`: whose the newest checkpoint is, None if there is none."""
        self.ended_badly(worker, now=now)
        tried = self._failures.setdefault(job, [])
        tried.append(worker)
        if left_by is None or left_by in tried:
            if len(tried) < MAX_FAILURES:
                return FailureMeans.AGAIN
            del self._failures[job]
            return FailureMeans.FAILED
        if len(set(tried)) < 2 and len(tried) < ALONE_FAILURES:
            return FailureMeans.AGAIN
        del self._failures[job]
        return FailureMeans.SET_ASIDE

    def lost(self, job: str, *, worker: str, now: float) -> bool:
        """A machine that had it is gone; whether that has happened too often."""
        self.ended_badly(worker, now=now)
        self._losses[job] += 1
        too_often = self._losses[job] >= MAX_LOSSES
        if too_often:
            del self._losses[job]
        return too_often

    def got_further(self, job: str, *, worker: str) -> None:
        """Or has finished it."""
        self._failures.pop(job, None)
        self._losses.pop(job, None)
        self._bad.pop(worker, None)
        self._rests_until.pop(worker, None)

    def ended_badly(self, worker: str, *, now: float) -> None:
        self._bad[worker] += 1
        over = self._bad[worker] - PATIENT_WITH
        if over > 0:
            seconds = min(FIRST_REST_SECONDS * 2 ** min(over - 1, 10), LONGEST_REST_SECONDS)
            self._rests_until[worker] = now + seconds

    def rest_seconds(self, worker: str, *, now: float) -> float:
        """For how long it gets no job; 0: it may have one."""
        return max(0.0, self._rests_until.get(worker, now) - now)
