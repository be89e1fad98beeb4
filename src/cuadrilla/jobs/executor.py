"""Whole runs as jobs: who does them (`Executor`: processes here, machines that join), which are to be done
(`JobSource`: a queue, a search), and the loop between the two.

A job has a name and a run directory. A place does one job after the other. What kills a job's process, or takes its
machine away, is no failure of the job: another place goes on from the last checkpoint, until it was lost too often
without a step forward.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from cuadrilla.crew.children import Deaths
from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.rundir import RunDir, last_rows

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0
"""A pass of a large model takes its time, and its checkpoint too."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that a place does not do any more: `complete`, or failed for a `reason`, or to be gone on with. `lost`: its
    process or its machine has gone, for a `reason`."""

    job: str
    place: str
    complete: bool = False
    lost: bool = False
    seconds: float = 0.0
    reason: str = ""


class Executor(Protocol):
    """Used by one thread."""

    @property
    def places(self) -> Mapping[str, str]:
        """The kind of device (cuda, cpu, ...; "" if not known) by the place's name."""

    @property
    def free(self) -> list[str]: ...

    @property
    def busy(self) -> dict[str, str]:
        """The job of each place that has one."""

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        """At a place that is free. Raises CuadrillaError."""

    def poll(self) -> list[Ended]:
        """Jobs that have ended since. Raises CuadrillaError."""

    def preempt(self, job: str) -> None:
        """Have it saved and given back; `poll` tells of it. Nothing, where no place has it, or was told before."""

    def close(self) -> None:
        """End whatever is still running."""


class JobSource(Protocol):
    """Used by one thread."""

    @property
    def is_done(self) -> bool:
        """There is no more to do, and will not be."""

    def next_job(self, place: str, device: str, /) -> str | None:
        """What a free place should do now."""

    def run_of(self, job: str) -> RunDir:
        """Ready to be trained. Raises CuadrillaError where it cannot be."""

    def begun(self, job: str, place: str, /) -> None: ...

    def ended(self, ended: Ended) -> None: ...

    def unwanted(self) -> Iterable[str]:
        """Jobs that are to be saved and given back."""


def hand_out(work: JobSource, executors: Sequence[Executor], *, stop: threading.Event) -> None:
    """Until all is done, or `stop` is set: then what is under way is saved. Raises LinkError, ResourceError, and what
    `work` raises."""
    losses: dict[str, Deaths] = {}

    def is_busy() -> bool:
        return any(executor.busy for executor in executors)

    def take_back() -> None:
        for ended in (ended for executor in executors for ended in executor.poll()):
            work.ended(replace(ended, reason="") if ended.lost and losses[ended.job].allow() else ended)

    def preempt(jobs: Iterable[str]) -> None:
        for job in jobs:
            for executor in executors:
                executor.preempt(job)

    while not stop.wait(POLL_SECONDS):
        take_back()
        preempt(work.unwanted())
        for executor in executors:
            for place in executor.free:
                _begin(work, executor, place, losses)
        if work.is_done and not is_busy():
            return
    preempt([job for executor in executors for job in executor.busy.values()])
    deadline = time.monotonic() + STOP_SECONDS
    while is_busy() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        take_back()


def _begin(work: JobSource, executor: Executor, place: str, losses: dict[str, Deaths]) -> None:
    """The first job for a free place that can be begun. Raises LinkError."""
    while (job := work.next_job(place, executor.places[place])) is not None:
        try:
            run = work.run_of(job)
            executor.start(job, run, place=place)
        except LinkError:
            raise
        except CuadrillaError as error:
            work.ended(Ended(job=job, place=place, reason=error.message))
        else:
            losses.setdefault(job, Deaths(partial(_newest_step, run)))
            work.begun(job, place)
            return


def _newest_step(run: RunDir) -> object:
    return last_rows(run.metrics)[-1:]
