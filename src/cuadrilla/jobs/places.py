"""Where jobs are done: whole runs, each by one machine. Here: each place is a process, one job after the other.

It ends with this one. It is told of a job by a line on its standard input, the folder, and leaves the outcome there. A
process that is killed is no failure of its job: it goes on from its checkpoint. A training that fails by itself
is, and its reason is kept; its process ends with it. But for one that got no further than to what another machine has
left: then that is set aside (`origin.py`).
"""

import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from cuadrilla.engines.children import Children
from cuadrilla.home import read_object
from cuadrilla.jobs.deal import ANY, Wants, suits
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, storage_errors, write_json

MAX_DEATHS = 3
"""Of processes that work on one job: then it counts as failed."""
MOST_TALK_BYTES, KEPT_TALK_BYTES = 2**26, 2**20
SILENT = Message("its process ended without a result")
OUTCOME = "outcome.json"
"""In a job's folder: whether its run is complete."""

log = logging.getLogger(__name__)


class Named(Protocol):
    """A job, whatever else its owner knows of it."""

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Named)


@dataclass(frozen=True, kw_only=True)
class Left(Generic[J]):
    """A job that a place does not do any more. `complete`: to the end. `reason`: why it failed; empty: somebody has to
    go on with it, if it is not complete."""

    job: J
    place: str
    complete: bool
    seconds: float
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Of the call of a function."""
    code: int = 0
    """With which its process ended, where that is known."""


class Doing(Protocol[J]):
    """Who does jobs, here or elsewhere. Used by one thread."""

    @property
    def places(self) -> Sequence[object]: ...

    @property
    def free(self) -> list[str]: ...

    @property
    def busy(self) -> dict[str, J]: ...

    def start(self, job: J, run: RunDir, *, name: str) -> None:
        """At a place that is free. Raises CuadrillaError."""

    def look(self) -> list[Left[J]]:
        """Who has ended since. Raises CuadrillaError."""

    def stop(self) -> None:
        """Have all save, if they can, and end; `look` tells of them."""

    def close(self) -> None:
        """End whoever is still there."""


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """`device`: what the run file's `train.device` becomes (empty: what it says). `threads` 0: all cores."""

    name: str
    device: str = ""
    threads: int = 0
    environment: Mapping[str, str]

    @property
    def command(self) -> list[str]:
        device = ["--device", self.device] if self.device else []
        return [sys.executable, "-m", "cuadrilla", "--json", "work-on", "--threads", str(self.threads), *device]


def keep_short(talk: Path) -> None:
    """The end of a log to which a process appends whatever a user's code prints. Raises ResourceError."""
    if not talk.exists() or talk.stat().st_size <= MOST_TALK_BYTES:
        return
    with storage_errors(talk), open(talk, "r+b") as file:
        file.seek(-KEPT_TALK_BYTES, os.SEEK_END)
        end = file.read(KEPT_TALK_BYTES)
        file.seek(0)
        file.truncate()
        file.write(end)


class Places(Generic[J]):
    """Of this machine. Used by one thread."""

    def __init__(self, places: list[LocalPlace], *, logs: Path) -> None:
        """`logs`: where the processes talk, a file for each."""
        self.places = places
        self._logs = logs
        self._children = Children(died=lambda name, reason: self._reasons.__setitem__(name, reason))
        self._reasons: dict[str, Message] = {}
        self._at: dict[str, tuple[J, RunDir, float]] = {}
        self._deaths: Counter[str] = Counter()
        self._recalled: set[str] = set()

    @property
    def free(self) -> list[str]:
        return [place.name for place in self.places if place.name not in self._at]

    @property
    def busy(self) -> dict[str, J]:
        return {name: job for name, (job, _, _) in self._at.items()}

    def device(self, place: str) -> str:
        """Of which kind it is: cuda, cpu, ..."""
        found = next(each for each in self.places if each.name == place)
        return (found.device or "cpu").partition(":")[0]

    def start(self, job: J, run: RunDir, *, name: str) -> None:
        """Raises ResourceError."""
        place = next(place for place in self.places if place.name == name)
        (run.path / OUTCOME).unlink(missing_ok=True)
        if name not in self._children.alive:
            make_private(self._logs)
            with storage_errors(self._logs), open(self._logs / f"{name}.txt", "ab") as talk:
                self._children.start(name, place.command, environment=place.environment, stderr=talk)
        self._at[name] = job, run, time.monotonic()
        self._recalled.discard(name)
        with suppress(BrokenPipeError):  # it has just died, which `look` will find
            stdin = self._children.alive[name].stdin
            assert stdin is not None
            stdin.write(f"{run.path}\n")
            stdin.flush()

    def look(self) -> list[Left[J]]:
        """Who has ended since."""
        left: list[Left[J]] = []
        for name in self._at:
            keep_short(self._logs / f"{name}.txt")
        ended = self._children.look()
        for name, (job, run, began) in list(self._at.items()):
            outcome = read_object(run.path / OUTCOME)
            if not outcome and name not in ended:
                continue
            del self._at[name]
            reason = self._reasons.pop(name, SILENT)
            if name in self._recalled and ended.get(name) == 0:
                reason = Message("")
            elif ended.get(name, 1) <= 0 and not outcome:
                self._deaths[job.name] += 1
                reason = reason if self._deaths[job.name] >= MAX_DEATHS else Message("")
            if reason and not outcome and (machine := _set_aside(run)):
                log.warning("%s: nobody can go on from what %s has left of it: %s", job.name, machine, reason)
                reason = Message("")
            left.append(
                Left(
                    job=job,
                    place=name,
                    complete=outcome.get("complete") is True,
                    seconds=time.monotonic() - began,
                    reason="" if outcome else reason,
                    code=0 if outcome else ended.get(name, 0),
                )
            )
        self._reasons.clear()  # of places that were idle
        return left

    def recall(self, job: J) -> None:
        """Have it saved and given back; `look` tells of it. Nothing, where nobody has it."""
        pids = self._children.pids()
        for name, (given, _, _) in self._at.items():
            if given.name == job.name and name in pids:
                self._recalled.add(name)
                with suppress(ProcessLookupError):
                    os.kill(pids[name], signal.SIGTERM)

    def stop(self) -> None:
        """Have all save and end; `look` tells of them."""
        self._recalled.update(self._at)
        for pid in self._children.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def close(self) -> None:
        """End whoever is still there."""
        self._children.end(finish_seconds=0.0)


class DoingRuns(Doing[J], Protocol[J]):
    """Who does jobs that can be saved at any moment."""

    def device(self, place: str) -> str:
        """Of which kind it is: cuda, cpu, ..."""

    def recall(self, job: J) -> None:
        """Have it saved and given back; `look` tells of it."""


class AllPlaces(Generic[J]):
    """Several of them as one. `wants`: of what kind a place has to be to get anything."""

    def __init__(self, parts: Sequence[DoingRuns[J]], *, wants: Wants = ANY) -> None:
        self._parts, self._wants = parts, wants

    @property
    def places(self) -> Sequence[object]:
        """By their names."""
        names = [
            (part, place.name if isinstance(place, LocalPlace) else str(place))
            for part in self._parts
            for place in part.places
        ]
        return [name for part, name in names if self._may(name, part)]

    @property
    def free(self) -> list[str]:
        return [name for part in self._parts for name in part.free if self._may(name, part)]

    def _may(self, name: str, part: DoingRuns[J]) -> bool:
        return suits(self._wants, place=name, device=part.device(name))

    @property
    def busy(self) -> dict[str, J]:
        return {name: job for part in self._parts for name, job in part.busy.items()}

    def start(self, job: J, run: RunDir, *, name: str) -> None:
        """Raises CuadrillaError."""
        next(part for part in self._parts if name in part.free).start(job, run, name=name)

    def look(self) -> list[Left[J]]:
        """Raises CuadrillaError."""
        return [left for part in self._parts for left in part.look()]

    def recall(self, job: J) -> None:
        for part in self._parts:
            part.recall(job)

    def stop(self) -> None:
        for part in self._parts:
            part.stop()

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _set_aside(run: RunDir) -> str:
    """What another machine has left, if it is the newest; whose it was."""
    from cuadrilla.jobs.origin import left_by, set_aside_of  # they know checkpoints, and load torch

    machine = left_by(run)
    if machine:
        set_aside_of(run, machine)
    return machine or ""


def tell_outcome(folder: Path, *, complete: bool, version: int) -> None:
    """How a job ended, for the process that handed it out. Raises ResourceError."""
    write_json(folder / OUTCOME, {"complete": complete, "version": version}, private=True)
