"""Whole runs as jobs. An `Executor` does them (processes here, machines that join), a `JobSource` names them (a queue,
a search), and `hand_out` is the loop between the two.

A job has a name and a run directory. An executor has places, and each does one job after the other. A job does not
fail if its process is killed or its machine goes away: another place goes on from the last checkpoint, until the job
was lost too often without a step forward.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cuadrilla.crew.children import Deaths
from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.rundir import RunDir

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0
"""Time for jobs to be saved: a pass of a large model takes long, and so does its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that its place no longer does. It is `complete`, or failed for a `reason`, or is to go on elsewhere.
    `lost`: its process or machine has gone, for a `reason`."""

    job: str
    place: str
    complete: bool = False
    lost: bool = False
    reason: str = ""


class Executor(Protocol):
    """Used by one thread."""

    @property
    def places(self) -> Mapping[str, str]:
        """The job of each place, by the place's name; "" where it is free."""

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        """Start a job at a free place. Raises CuadrillaError."""

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call. Raises CuadrillaError."""

    def preempt(self, job: str) -> None:
        """Have a job saved and given back; `poll` returns it then. Does nothing for a job that no place has."""

    def close(self) -> None:
        """End whatever is still running."""


class JobSource(Protocol):
    """Used by one thread."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, and nothing more will come."""

    def next_job(self, place: str, /) -> str | None:
        """The job that a free place should do now; None if there is none. It counts as running from then on."""

    def run_of(self, job: str) -> RunDir:
        """A job's run directory, ready to be trained. Raises CuadrillaError if it cannot be made ready."""

    def ended(self, ended: Ended) -> None: ...

    def unwanted(self) -> Iterable[str]:
        """Jobs that are to be saved and given back."""


def running(executors: Sequence[Executor]) -> list[str]:
    return [job for executor in executors for job in executor.places.values() if job]


def hand_out(work: JobSource, executors: Sequence[Executor], *, stop: threading.Event) -> None:
    """Start jobs at free places until all are done, or until `stop` is set; then running jobs are saved. Raises
    LinkError, ResourceError, and what `work` raises."""
    losses: dict[str, Deaths] = {}

    def take_back() -> None:
        for ended in (ended for executor in executors for ended in executor.poll()):
            again = ended.lost and losses[ended.job].allow()
            work.ended(replace(ended, reason="") if again else ended)
            if not again:
                losses.pop(ended.job, None)

    def preempt(jobs: Iterable[str]) -> None:
        for job in jobs:
            for executor in executors:
                executor.preempt(job)

    while not stop.wait(POLL_SECONDS):
        take_back()
        preempt(work.unwanted())
        for executor in executors:
            for place in [name for name, job in executor.places.items() if not job]:
                _begin(work, executor, place, losses)
        if work.is_done and not running(executors):
            return
    preempt(running(executors))
    deadline = time.monotonic() + STOP_SECONDS
    while running(executors) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        take_back()


def _begin(work: JobSource, executor: Executor, place: str, losses: dict[str, Deaths]) -> None:
    """Start the next job for a free place; a job that cannot be started has ended. Raises LinkError."""
    while (job := work.next_job(place)) is not None:
        try:
            run = work.run_of(job)
            executor.start(job, run, place=place)
        except LinkError:
            raise
        except CuadrillaError as error:
            work.ended(Ended(job=job, place=place, reason=error.message))
        else:
            losses.setdefault(job, Deaths(run))
            return
