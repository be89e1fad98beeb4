"""A queue or a search, followed: what the dashboard shows of its runs and of the machines that do them.

The machines are those of a run directory (`watch.py`); to each is added what it has now. A reader asks for `news` since
its place, and gets the runs that have changed, not all of them.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuadrilla.monitor.jobs import JobNow, JobsReader, LentMachines, jobs_by_place
from cuadrilla.monitor.nodes import MOST_NAME
from cuadrilla.monitor.watch import REFRESH_SECONDS, WatchedRun, WatchPlace, node_row
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir

MOST_JOBS = 300
"""On the page; those that ended first are left out first."""
MOST_NAMES = 64
TOLD_OF_MACHINES = ("points", "anew")


@dataclass(frozen=True, kw_only=True)
class JobsPlace:
    """How much a reader has been told. `number`: of the newest change of a job."""

    machines: WatchPlace = field(default_factory=WatchPlace)
    number: int = 0
    head: str = ""
    order: str = ""
    crew: str = ""


class WatchedJobs:
    """`refresh` and `news` may be called from any thread. `key_of`: what the dashboard calls the run of a job; empty:
    it cannot be looked at."""

    def __init__(self, reader: JobsReader, *, key_of: Callable[[JobNow], str]) -> None:
        self._reader, self._key_of = reader, key_of
        self._machines, self._lent = WatchedRun(RunDir(reader.folder)), LentMachines()
        self._lock = threading.Lock()
        self._refreshed = float("-inf")
        self._jobs: list[JobNow] = []
        self._rows: dict[str, tuple[int, dict[str, Any]]] = {}
        """By name, with the number of its newest change."""
        self._number = 0

    @property
    def is_behind(self) -> bool:
        return False  # a refresh takes in all that there is

    @property
    def is_handed_out(self) -> bool:
        return self._machines.is_running

    def refresh(self) -> None:
        """Take in what was written since; not more often than twice a second."""
        with self._lock:
            if time.monotonic() - self._refreshed < REFRESH_SECONDS:
                return
            self._machines.refresh()
            self._jobs = self._reader.read()
            self._lent.read(self._jobs)
            before, self._rows = self._rows, {}
            for job in shown_jobs(self._jobs):
                row = self._row(job)
                number, known = before.get(job.name, (0, None))
                if row != known:
                    self._number += 1
                    number = self._number
                self._rows[job.name] = number, row
            self._refreshed = time.monotonic()

    def news(self, place: JobsPlace) -> tuple[dict[str, Any], JobsPlace]:
        """By name, what a reader at this place lacks; and where it is then."""
        with self._lock:
            of_machines, at = self._machines.news(place.machines)
            if "anew" in of_machines:
                place = JobsPlace()
            head, order, crew = self._head(), list(self._rows), self._crew()
            here = JobsPlace(
                machines=at, number=self._number, head=json.dumps(head), order=json.dumps(order), crew=json.dumps(crew)
            )
            found = {name: of_machines[name] for name in TOLD_OF_MACHINES if name in of_machines}
            found |= {"head": head} if here.head != place.head else {}
            found |= {"order": order} if here.order != place.order else {}
            found |= {"crew": crew} if here.crew != place.crew else {}
            if changed := [row for number, row in self._rows.values() if number > place.number]:
                found["jobs"] = changed
            return found, here

    def _head(self) -> dict[str, Any]:
        return {
            "kind": self._reader.kind,
            "title": self._reader.title,
            "running": self.is_handed_out,
            "number": len(self._jobs),
            "ended": sum(job.has_ended for job in self._jobs),
            "hidden": len(self._jobs) - len(self._rows),
        }

    def _row(self, job: JobNow) -> dict[str, Any]:
        told = {key: value for key, value in vars(job).items() if key not in ("run", "wants")}
        on = [one_line(name, most=MOST_NAME) for name in job.wants.on[:MOST_NAMES]]
        wants = {"machines": job.wants.machines, "on": on, "device": one_line(job.wants.device, most=MOST_NAME)}
        return {**told, "wants": wants, "key": self._key_of(job)}

    def _crew(self) -> list[dict[str, Any]]:
        """Those who have joined, those who are lent to a run, and whoever has a job beside them: this machine's places.
        Who has a job is here."""
        has = jobs_by_place(self._jobs, name=lambda job: job.name)
        rows = {row["name"]: {**row, "jobs": []} for row in self._machines.rows()}
        for name, jobs in has.items():
            lent = node_row(self._lent.nodes.get(name), here=True)
            rows[name] = {"name": name, "works": True, **rows.get(name, {}), **lent, "here": True, "jobs": jobs}
        return sorted(rows.values(), key=lambda row: not row["here"])


def shown_jobs(jobs: Sequence[JobNow]) -> list[JobNow]:
    """In their order; where there are too many, without those that ended first."""
    too_many = len(jobs) - MOST_JOBS
    left_out: set[str] = set()
    for job in jobs:
        if len(left_out) < too_many and job.has_ended:
            left_out.add(job.name)
    return [job for job in jobs if job.name not in left_out][:MOST_JOBS]
