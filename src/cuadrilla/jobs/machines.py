"""All that can train the runs of a queue: this machine, machines that have joined, and several of them as one."""

import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from cuadrilla.jobs.crew import CrewPlaces
from cuadrilla.jobs.deal import Candidate, Wants
from cuadrilla.jobs.places import AllPlaces, Left, LocalPlace, Named, Places
from cuadrilla.jobs.together import LentRuns
from cuadrilla.link.names import node_of
from cuadrilla.rundir import RunDir

RETURN_SECONDS = 10.0
"""A machine that was lent comes back by then, and should hear that all is over rather than find nobody."""


class WantingJob(Named, Protocol):
    """A job that says what it wants."""

    @property
    def wants(self) -> Wants: ...


W = TypeVar("W", bound=WantingJob)


class Machines(Generic[W]):
    """Used by one thread. `here` None: this one only coordinates."""

    def __init__(self, crew: CrewPlaces[W], *, here: Places[W] | None) -> None:
        self._here: dict[str, LocalPlace] = {place.name: place for place in here.places} if here is not None else {}
        self._devices = {name: here.device(name) for name in self._here} if here is not None else {}
        """Of which kind each place is, or was when its machine was lent."""
        self._places: AllPlaces[W] = AllPlaces([*([here] if here is not None else []), crew])
        self._crew = crew
        self._returning: dict[str, float] = {}
        """Until when machines that were lent, and were there, are waited for."""
        self._lent: LentRuns[W] = LentRuns(crew)

    @property
    def machines(self) -> list[Candidate]:
        """Each place of this machine counts as one, each machine that has joined with all of its devices."""
        lent, free = self._lent.machines, set(self._places.free)
        there = {*self._here, *self._crew.places}
        known = self._devices | {name: self._crew.device(name) for name in self._crew.places}
        self._devices = {name: kind for name, kind in known.items() if name in there or node_of(name) in lent}
        of: dict[str, dict[str, str]] = {}
        for name in [*self._here, *sorted(self._devices.keys() - self._here)]:
            machine = name if name in self._here else node_of(name)
            of.setdefault(machine, {})[name] = self._devices[name]
        return [
            Candidate(
                name=machine, devices=devices, free=[] if machine in lent else [*filter(free.__contains__, devices)]
            )
            for machine, devices in of.items()
        ]

    @property
    def busy(self) -> bool:
        return bool(self._places.busy or self._lent.machines or self._returning)

    def start(self, job: W, run: RunDir, *, places: Sequence[str]) -> None:
        """Raises CuadrillaError."""
        if job.wants.machines == 1:
            self._places.start(job, run, name=places[0])
            return
        here = [self._here[name] for name in places if name in self._here]
        nodes = list(dict.fromkeys(node_of(name) for name in places if name not in self._here))
        self._lent.start(job, run, machines=nodes, here=here)

    def look(self) -> list[Left[W]]:
        """Raises CuadrillaError."""
        left, now = self._lent.look(), time.monotonic()
        for each in left:
            self._returning |= dict.fromkeys(each.place.split(", "), now + RETURN_SECONDS)
        there = {*self._here, *map(node_of, self._crew.places)}
        self._returning = {name: end for name, end in self._returning.items() if now < end and name not in there}
        return [*self._places.look(), *left]

    def recall(self, job: W) -> None:
        self._places.recall(job)
        self._lent.recall(job)

    def stop(self) -> None:
        self._places.stop()
        self._lent.stop()

    def __enter__(self) -> "Machines[W]":
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        """End whoever is still there; what several machines do is saved first, unless a person is in a hurry."""
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            self._lent.close()
        self._places.close()
