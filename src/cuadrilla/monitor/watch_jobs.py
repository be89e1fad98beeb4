"""A queue or a search, followed: what the dashboard's page is sent of its runs and of the machines that do them."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuadrilla.monitor.jobs import JobNow, JobsReader, WorkNow, WorkReader
from cuadrilla.monitor.nodes import MAX_NAME
from cuadrilla.monitor.run import REFRESH_SECONDS, RunPlace, machine_data
from cuadrilla.printable import one_line

MAX_JOBS = 300
"""On the page; those that ended first are left out first."""
MAX_NAMES = 64
TOLD_OF_MACHINES = ("points", "anew")


@dataclass(frozen=True, kw_only=True)
class JobsPlace:
    """How much a page has been told. `parts`: by name, as JSON."""

    machines: RunPlace = field(default_factory=RunPlace)
    parts: Mapping[str, str] = field(default_factory=dict)


class WatchedJobs:
    """`refresh` and `news` may be called from any thread. `key_of`: what the dashboard calls the run of a job; empty:
    it cannot be looked at."""

    is_behind = False  # a refresh takes in all that there is

    def __init__(self, reader: JobsReader, *, key_of: Callable[[JobNow], str]) -> None:
        self._work, self._key_of = WorkReader(reader), key_of
        self._lock = threading.Lock()
        self._refreshed = float("-inf")
        self._parts: dict[str, Any] = {}

    def refresh(self) -> None:
        """Take in what was written since; not more often than twice a second."""
        with self._lock:
            if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
                self._parts = self._read(self._work.read(now=time.time()))
                self._refreshed = time.monotonic()

    def news(self, place: JobsPlace) -> tuple[dict[str, Any], JobsPlace]:
        """By name, what a page at this place lacks; and where it is then."""
        with self._lock:
            of_machines, at = self._work.run.news(place.machines)
            told = {} if "anew" in of_machines else place.parts
            here = JobsPlace(machines=at, parts={name: json.dumps(part) for name, part in self._parts.items()})
            found = {name: of_machines[name] for name in TOLD_OF_MACHINES if name in of_machines}
            return found | {name: self._parts[name] for name in here.parts if here.parts[name] != told.get(name)}, here

    def _read(self, now: WorkNow) -> dict[str, Any]:
        jobs = shown_jobs(now.jobs)
        head = {"kind": now.kind, "title": now.title, "running": now.is_handed_out, "number": len(now.jobs)}
        crew = [
            {**machine_data(machine), "jobs": [job.name for job in now.jobs_of.get(machine.name, ())]}
            for machine in now.machines.machines
        ]
        return {
            "head": {**head, "ended": now.num_ended, "hidden": len(now.jobs) - len(jobs)},
            "jobs": [self._row(job) for job in jobs],
            "crew": crew,
        }

    def _row(self, job: JobNow) -> dict[str, Any]:
        told = {key: value for key, value in vars(job).items() if key not in ("run", "wants")}
        on = [one_line(name, most=MAX_NAME) for name in job.wants.on[:MAX_NAMES]]
        wants = {"on": on, "device": one_line(job.wants.device, most=MAX_NAME)}
        return {**told, "wants": wants, "key": self._key_of(job)}


def shown_jobs(jobs: Sequence[JobNow]) -> list[JobNow]:
    """In their order; where there are too many, without those that ended first."""
    ended = [job.name for job in jobs if job.has_ended]
    left_out = set(ended[: max(0, len(jobs) - MAX_JOBS)])
    return [job for job in jobs if job.name not in left_out][:MAX_JOBS]
