"""Where calls of a function are done by the workers of a Dask cluster: each worker is a place, one call at a time.

A worker that goes away while it makes a call is no failure of the trial, unless that happens again and again: another
one makes it. What the function printed there comes back into the trial's log here.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cuadrilla.engines.calls import REQUEST
from cuadrilla.engines.children import ended_by, reason_of
from cuadrilla.home import read_object
from cuadrilla.jobs.calls import TALK, left_with, parse_answer
from cuadrilla.jobs.places import MAX_DEATHS, SILENT, Left
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, storage_errors
from cuadrilla.tune.function import read_code
from cuadrilla.tune.search import Job

if TYPE_CHECKING:
    from cuadrilla.engines.dask import CallEnd, DaskCalls


class DaskPlaces:
    """Used by one thread."""

    def __init__(self, calls: "DaskCalls") -> None:
        self._calls = calls
        self._at: dict[str, tuple[Job, RunDir, float]] = {}
        self._deaths: Counter[tuple[int, int]] = Counter()
        self._stopped = False

    @property
    def places(self) -> Sequence[str]:
        return self._calls.workers

    @property
    def free(self) -> list[str]:
        return [name for name in self.places if name not in self._at]

    @property
    def busy(self) -> dict[str, Job]:
        return {name: job for name, (job, _, _) in self._at.items()}

    def start(self, job: Job, run: RunDir, *, name: str) -> None:
        """Raises LinkError, TaskError."""
        request = read_object(run.path / REQUEST)
        path = run.path / request["file"]
        self._calls.begin(name, {**request, "file": path.name}, read_code(path))
        self._at[name] = job, run, time.monotonic()

    def look(self) -> list[Left[Job]]:
        """Who has ended since. Raises LinkError, EnvironmentProblem."""
        left: list[Left[Job]] = []
        for name, end in self._calls.look().items():
            job, run, began = self._at.pop(name)
            _keep(end.talk, run)
            answer = parse_answer(end.said) if end.code == 0 else None
            reason = self._reason(job, end)
            left.append(left_with(answer, job=job, place=name, seconds=time.monotonic() - began, reason=reason))
        return left

    def stop(self) -> None:
        self._stopped = True
        self._calls.cancel()

    def close(self) -> None:
        self.stop()

    def _reason(self, job: Job, end: "CallEnd") -> Message:
        """Why a call without a result failed; empty: somebody has to make it again."""
        if end.code == 0 and not end.is_lost:
            return SILENT
        if end.code > 0:
            return reason_of(end.said, end.code)
        self._deaths[job.key] += not self._stopped
        if self._deaths[job.key] < MAX_DEATHS:
            return Message("")
        if end.is_lost:
            return Message("{number} workers have gone away during this call", number=MAX_DEATHS)
        return ended_by(end.code)


def _keep(talk: bytes, run: RunDir) -> None:
    if talk:
        make_private(run.logs)
        with storage_errors(run.logs), open(run.logs / TALK, "ab") as file:
            file.write(talk)
