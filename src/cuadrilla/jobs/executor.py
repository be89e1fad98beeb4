"""Whole runs as jobs: the one interface of whatever carries them out, processes here (`local.py`) or machines that join
(`crew.py`).

A job has a name and a run directory. A place does one job after the other. A place that is gone is no failure of its
job: another one goes on from the last checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cuadrilla.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that a place does not do any more. `complete`: to the end. `reason`: why it failed; empty: somebody has to
    go on with it, if it is not complete. `code`: of its process, where that is known."""

    job: str
    place: str
    complete: bool
    seconds: float
    reason: str = ""
    code: int = 0


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
        """Have it saved and given back; `poll` tells of it. Nothing, where no place has it."""

    def close(self) -> None:
        """End whatever is still running."""


class Executors:
    """Several of them as one."""

    def __init__(self, parts: Sequence[Executor]) -> None:
        self._parts = parts

    @property
    def places(self) -> dict[str, str]:
        return {name: device for part in self._parts for name, device in part.places.items()}

    @property
    def free(self) -> list[str]:
        return [name for part in self._parts for name in part.free]

    @property
    def busy(self) -> dict[str, str]:
        return {name: job for part in self._parts for name, job in part.busy.items()}

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        next(part for part in self._parts if place in part.free).start(job, run, place=place)

    def poll(self) -> list[Ended]:
        return [ended for part in self._parts for ended in part.poll()]

    def preempt(self, job: str) -> None:
        for part in self._parts:
            part.preempt(job)

    def close(self) -> None:
        for part in self._parts:
            part.close()
