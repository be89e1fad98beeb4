"""Jobs that several machines do together: each is a run of a crew, whose machines are lent for as long as it lasts.

This process coordinates each in a thread of its own; the run's checkpoints and rows are written here by itself. Where
nobody of its machines is left, it is saved, and somebody has to go on with it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic

from cuadrilla.engines.crew import Lending, Opening, OwnWorker
from cuadrilla.engines.run import Audience, train_run
from cuadrilla.errors import CuadrillaError
from cuadrilla.jobs.crew import CrewPlaces
from cuadrilla.jobs.places import J, Left, LocalPlace
from cuadrilla.link.names import JOB_NAME
from cuadrilla.log import COORDINATES
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import Resolved, read_run_file
from cuadrilla.train.coordinate import Outcome

SAVE_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Given(Generic[J]):
    """A job under way. `machines`: whose it is."""

    job: J
    run: RunDir
    machines: Sequence[str]
    began: float
    thread: threading.Thread | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None
    stops: bool = False
    request_stop: Callable[[str], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def stopping(self, request_stop: Callable[[str], None]) -> Iterator[None]:
        """While it can be asked to stop."""
        with self.lock:
            self.request_stop, stops = request_stop, self.stops
        if stops:
            request_stop(_WANTED_BACK)
        try:
            yield
        finally:
            with self.lock:
                self.request_stop = None

    def stop(self) -> None:
        """Have it saved and ended, now or as soon as it has begun."""
        with self.lock:
            self.stops, request_stop = True, self.request_stop
        if request_stop is not None:
            request_stop(_WANTED_BACK)

    def __enter__(self) -> "_Given[J]":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> bool:
        """Whatever ends it is kept, a task's `sys.exit` too: no other run ends with it."""
        self.error = error
        return True

    def train(self, resolved: Resolved, lending: Lending) -> None:
        """To its end."""
        audience, opening = Audience(stopping=self.stopping), Opening(lending=lending)
        with self:
            self.outcome = train_run(resolved, self.run, allow_changes=True, opening=opening, audience=audience)

    def left(self) -> Left[J]:
        """Once it has ended."""
        complete = self.outcome is not None and (self.outcome.complete or not self.outcome.interrupted)
        reason: str = Message("")
        if isinstance(self.error, CuadrillaError):
            reason = self.error.message
        elif self.error is not None:
            log.error("%s", self.job.name, exc_info=self.error)
            reason = Message("{kind}: {error}", kind=type(self.error).__name__, error=self.error)
        seconds, place = time.monotonic() - self.began, ", ".join(self.machines)
        return Left(job=self.job, place=place, complete=complete, seconds=seconds, reason=reason)


_WANTED_BACK = Message("whoever gave this job away wants it back")


class LentRuns(Generic[J]):
    """Over the machines that have joined, and the places of this one. Used by one thread."""

    def __init__(self, crew: CrewPlaces[J]) -> None:
        self._crew = crew
        self._given: dict[str, _Given[J]] = {}

    @property
    def machines(self) -> set[str]:
        """Those that have a job: machines that have joined, places of this one."""
        return {name for given in self._given.values() for name in given.machines}

    def start(self, job: J, run: RunDir, *, machines: Sequence[str], here: Sequence[LocalPlace]) -> None:
        """`machines`: nodes that have joined; `here`: places of this machine, which are free. Raises ConfigError for a
        run that cannot be read."""
        assert self._crew.lender is not None
        assert JOB_NAME.fullmatch(job.name), job.name
        number = len(machines) + len(here)
        resolved = read_run_file(run.run_file, sets=['engine.kind="crew"', f"engine.workers={[1.0] * number}"])
        lending = Lending(
            lender=self._crew.lender,
            name=job.name,
            nodes=tuple(machines),
            own=tuple(_own_worker(place) for place in here),
        )
        names = (*machines, *(place.name for place in here))
        given = self._given[job.name] = _Given(job=job, run=run, machines=names, began=time.monotonic())
        given.thread = threading.Thread(
            target=given.train, args=(resolved, lending), name=COORDINATES + job.name, daemon=True
        )
        given.thread.start()

    def look(self) -> list[Left[J]]:
        """Who has ended since."""
        left: list[Left[J]] = []
        for name, given in list(self._given.items()):
            if given.thread is not None and not given.thread.is_alive():
                del self._given[name]
                left.append(given.left())
        return left

    def recall(self, job: J) -> None:
        """Have it saved and given back; `look` tells of it. Nothing, where nobody has it."""
        if (given := self._given.get(job.name)) is not None:
            given.stop()

    def stop(self) -> None:
        """Have all save and end; `look` tells of them."""
        for given in self._given.values():
            given.stop()

    def close(self) -> None:
        """Have all save, and wait for it a while."""
        self.stop()
        deadline = time.monotonic() + SAVE_SECONDS
        for given in self._given.values():
            if given.thread is not None:
                given.thread.join(max(0.0, deadline - time.monotonic()))


def _own_worker(place: LocalPlace) -> OwnWorker:
    use = Use(name="", device=place.device, threads=place.threads, environment=place.environment)
    return OwnWorker(name=place.name, speed=1.0, use=use)
