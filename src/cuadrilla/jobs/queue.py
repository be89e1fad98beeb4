"""The queue of this machine: runs that wait for a machine, in an order that its owner may change, as a `JobSource`.

Invariants
* One file holds all runs in their order. A process locks it while it changes it; reading needs no lock.
* If the machine that trains a run goes away, or the process that hands runs out, the run waits again where it stood.
* A run that has ended stays listed until it is removed, and is not begun again unless it is added again.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from cuadrilla.errors import ConfigError
from cuadrilla.jobs.executor import Ended
from cuadrilla.link.base import node_of
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, read_object, write_json

WAITING, RUNNING, COMPLETE, FAILED, STOPPED = "waiting", "running", "complete", "failed", "stopped"
ENDED = (COMPLETE, FAILED, STOPPED)
NAME_CHARACTERS, ID_DIGITS = 40, 8
LIST = "runs.json"


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """`name`: the name of its job. `on`: machines, their places, or kinds of devices (cuda, cpu) that may train it;
    empty: any. `place`: the one that trains it, or trained it last. `stops`: it is to stop."""

    name: str
    run: RunDir
    on: tuple[str, ...] = ()
    stops: bool = False
    state: str = WAITING
    place: str = ""
    reason: str = ""

    @property
    def machine(self) -> str:
        """The machines that may train a waiting run; else the place that trains it, or trained it last."""
        return ", ".join(self.on) if self.state == WAITING else self.place

    def suits(self, place: str, *, device: str) -> bool:
        return not self.on or not {place, node_of(place), device}.isdisjoint(self.on)


class RunQueue:
    """The queue in a folder of its own, which exists only after a run was added. `is_handed_out` False: no process
    hands runs out, so no machine trains one, whatever the file says."""

    def __init__(self, folder: Path, *, is_handed_out: bool = True) -> None:
        self._folder, self._is_handed_out = folder, is_handed_out

    def runs(self) -> list[QueuedRun]:
        """All runs, in their order."""
        return list(map(self._read, read_object(self._folder / LIST).get("runs", [])))

    def _read(self, row: dict[str, Any]) -> QueuedRun:
        run = QueuedRun(**{**row, "run": RunDir(Path(row["run"])), "on": tuple(row["on"])})
        if run.state == RUNNING and not self._is_handed_out:
            run = replace(run, state=WAITING)
        return replace(run, state=STOPPED) if run.stops and run.state == WAITING else run

    @contextmanager
    def _changed(self) -> Iterator[list[QueuedRun]]:
        """The runs, to be changed by one process at a time. Raises ResourceError."""
        make_private(self._folder)
        with FileLock(self._folder / f"{LIST}.lock"):
            runs = self.runs()
            yield runs
            rows = [{**vars(run), "run": str(run.run.path)} for run in runs]
            write_json(self._folder / LIST, {"runs": rows}, private=True)

    def _replace(self, name: str, **changes: Any) -> None:
        """Change a run; do nothing if it has just been removed."""
        with self._changed() as runs:
            runs[:] = [replace(run, **changes) if run.name == name else run for run in runs]

    def add(self, run: RunDir, *, on: tuple[str, ...] = ()) -> QueuedRun:
        """Add a run at the end; one that has ended begins again. Raises ConfigError while it runs, ResourceError."""
        path = run.path.resolve()
        added = QueuedRun(name=_name_of(path), run=RunDir(path), on=on)
        with self._changed() as runs:
            self.require_free(run)
            runs[:] = [*(each for each in runs if each.name != added.name), added]
        return added

    def require_free(self, run: RunDir) -> None:
        """Raises ConfigError while a machine trains it."""
        for known in self.runs():
            if known.run.path == run.path.resolve() and known.state == RUNNING:
                hint = "first: cuadrilla queue stop {name}"
                raise ConfigError("{name} is running", name=run.path.name, hint=hint)

    def find(self, named: str) -> QueuedRun:
        """Find a run by its folder, or by the folder's name if only one run has that. Raises ConfigError."""
        runs = self.runs()
        path = Path(named).resolve()
        found = [run for run in runs if run.run.path == path] or [run for run in runs if run.run.path.name == named]
        if len(found) != 1:
            names = ", ".join(run.run.path.name for run in runs) or Message("nothing")
            problem = "several runs in the queue are called {name}" if found else "{name} is not in the queue"
            hint = "name its folder" if found else "in the queue: {names}"
            raise ConfigError(problem, name=named, hint=hint, names=names)
        return found[0]

    def put_first(self, run: QueuedRun) -> None:
        with self._changed() as runs:
            runs.sort(key=lambda each: each.name != run.name)

    def stop(self, run: QueuedRun) -> None:
        """Have its machine save it and give it back. A waiting run will not begin."""
        self._replace(run.name, stops=True)

    def remove(self, run: QueuedRun) -> None:
        """Take a run from the list; its folder stays. Raises ConfigError while a machine trains it."""
        with self._changed() as runs:
            self.require_free(run.run)
            runs[:] = [each for each in runs if each.name != run.name]

    def note(self, run: QueuedRun, state: str, *, place: str = "", reason: str = "") -> None:
        """Write a run's state. For the process that hands runs out. Raises ResourceError."""
        self._replace(run.name, state=state, place=place, reason=reason)


Tell = Callable[[QueuedRun, str, str, str], None]


class QueueWork:
    """The runs of a queue as a `JobSource`. A queue has one at a time."""

    def __init__(self, queue: RunQueue, *, tell: Tell, until_empty: bool = False) -> None:
        """`tell`: called with a run, its new state, its place and the reason, when it begins and when it ends."""
        self._queue, self._tell, self._until_empty = queue, tell, until_empty
        self._begun: dict[str, QueuedRun] = {}
        for run in queue.runs():
            if run.state == RUNNING:  # handed out by a process that has gone
                queue.note(run, WAITING)

    @property
    def is_done(self) -> bool:
        return self._until_empty and all(run.state in ENDED for run in self._queue.runs())

    def next_job(self, place: str, device: str) -> str | None:
        waiting = [run for run in self._queue.runs() if run.state == WAITING and run.suits(place, device=device)]
        if not waiting:
            return None
        self._begun[waiting[0].name] = waiting[0]
        return waiting[0].name

    def run_of(self, job: str) -> RunDir:
        return self._begun[job].run

    def begun(self, job: str, place: str) -> None:
        self._note(self._begun[job], RUNNING, place=place)

    def ended(self, ended: Ended) -> None:
        run = self._begun[ended.job]
        if ended.complete or ended.reason:
            self._note(run, COMPLETE if ended.complete else FAILED, place=ended.place, reason=ended.reason)
        elif run.name in self.unwanted():
            self._note(run, STOPPED, place=ended.place)
        else:
            self._queue.note(run, WAITING, place=ended.place)

    def unwanted(self) -> list[str]:
        return [run.name for run in self._queue.runs() if run.stops and run.state == RUNNING]

    def _note(self, run: QueuedRun, state: str, *, place: str = "", reason: str = "") -> None:
        self._queue.note(run, state, place=place, reason=reason)
        self._tell(run, state, place, reason)


def _name_of(path: Path) -> str:
    """A name for files and for other machines: the folder's name, which a person knows, and a hash of its path."""
    plain = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:NAME_CHARACTERS] or "run"
    return f"{plain}-{hashlib.sha256(str(path).encode()).hexdigest()[:ID_DIGITS]}"
