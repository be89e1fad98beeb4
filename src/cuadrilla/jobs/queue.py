"""The queue of this machine: runs that wait for a machine, in an order that its owner may change; who hands them out.

Invariants
* A file for each run, `ID.json`, written by commands; how it stands is in `ID.now.json`, written by the one process
  that hands out. Each write is whole or not there, so nobody has to wait for anybody.
* A run that was given to a machine which has gone, or whose hander-out has gone, waits again, where it stood.
* What has ended stays listed until it is removed, and is not begun again unless it is added again.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cuadrilla.errors import ConfigError
from cuadrilla.jobs.executor import Ended
from cuadrilla.link.base import JOB_NAME, node_of
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, read_object, write_json

WAITING, RUNNING, COMPLETE, FAILED, STOPPED = "waiting", "running", "complete", "failed", "stopped"
ENDED = (COMPLETE, FAILED, STOPPED)
DEVICES = ("cuda", "mps", "xpu", "cpu")
NAME_CHARACTERS, ID_DIGITS = 40, 8


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """`name`: what it is called where it is handed out. `on`: machines, or their places, that may train it; empty: any.
    `device`: one of `DEVICES` that the place has to have; empty: any. `place`: who has it, or had it last. `stops`: it
    is to stop."""

    name: str
    run: RunDir
    order: float
    on: tuple[str, ...] = ()
    device: str = ""
    stops: bool = False
    state: str = WAITING
    place: str = ""
    reason: str = ""

    @property
    def machine(self) -> str:
        """Who has it, had it last, or may have it."""
        return ", ".join(filter(None, (*self.on, self.device))) if self.state == WAITING else self.place

    def suits(self, place: str, *, device: str) -> bool:
        """Whether it may be trained there: at a place of that name, or of a machine of that name."""
        return (not self.on or not {place, node_of(place)}.isdisjoint(self.on)) and self.device in ("", device)


class RunQueue:
    """In a folder of its own; creates nothing before something is added. `is_handed_out` False: whoever did is gone, so
    nobody has a run, whatever the files say."""

    def __init__(self, folder: Path, *, is_handed_out: bool = True) -> None:
        self._folder = folder
        self._held = (RUNNING,) if is_handed_out else ()

    def runs(self) -> list[QueuedRun]:
        """In their order."""
        paths = [path for path in self._folder.glob("*.json") if JOB_NAME.fullmatch(path.stem)]
        found = [run for path in paths if (run := self._read(path))]
        return sorted(found, key=lambda run: (run.order, run.name))

    def add(self, run: RunDir, *, on: tuple[str, ...] = (), device: str = "") -> QueuedRun:
        """At the end; one that has ended is begun again. Raises ConfigError while a machine has it, ResourceError."""
        self.require_free(run)
        path = run.path.resolve()
        order = max((each.order for each in self.runs()), default=0.0) + 1
        added = QueuedRun(name=_name_of(path), run=RunDir(path), order=order, on=on, device=device)
        make_private(self._folder)
        self._now(added.name).unlink(missing_ok=True)
        self._write(added)
        return added

    def require_free(self, run: RunDir) -> None:
        """Raises ConfigError while a machine has it."""
        for known in self.runs():
            if known.run.path == run.path.resolve() and known.state == RUNNING:
                hint = "first: cuadrilla queue stop {name}"
                raise ConfigError("{name} is running", name=run.path.name, hint=hint)

    def find(self, named: str) -> QueuedRun:
        """By its folder, or the folder's name if only one has it. Raises ConfigError."""
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
        first = min((each.order for each in self.runs()), default=0.0) - 1
        self._write(replace(run, order=first))

    def stop(self, run: QueuedRun) -> None:
        """Its machine saves and gives it back; one that waits is not begun."""
        self._write(replace(run, stops=True))

    def remove(self, run: QueuedRun) -> None:
        """Take it from the list; its folder stays. Raises ConfigError while a machine has it."""
        self.require_free(run.run)
        for path in (self._now(run.name), self._folder / f"{run.name}.json"):
            path.unlink(missing_ok=True)

    def note(self, run: QueuedRun, state: str, *, place: str = "", reason: str = "") -> None:
        """Write its state, for the process that hands out. Raises ResourceError."""
        write_json(self._now(run.name), {"state": state, "place": place, "reason": reason}, private=True)

    def _now(self, name: str) -> Path:
        return self._folder / f"{name}.now.json"

    def _write(self, run: QueuedRun) -> None:
        said = {key: getattr(run, key) for key in ("order", "on", "device", "stops")}
        write_json(self._folder / f"{run.name}.json", {"run": str(run.run.path), **said}, private=True)

    def _read(self, path: Path) -> QueuedRun | None:
        said, now = read_object(path), read_object(self._now(path.stem))
        if not said:  # it has just been removed
            return None
        state = now.get("state", WAITING)
        if state not in (*self._held, *ENDED):
            state = STOPPED if said["stops"] else WAITING
        return QueuedRun(
            name=path.stem,
            run=RunDir(Path(said["run"])),
            order=said["order"],
            on=tuple(said["on"]),
            device=said["device"],
            stops=said["stops"],
            state=state,
            place=now.get("place", ""),
            reason=now.get("reason", "") if self._held or state in ENDED else "",
        )


Tell = Callable[[QueuedRun, str, str, str], None]


class QueueWork:
    """The runs of a queue as the work of an `Executor`; there is one for a queue."""

    def __init__(self, queue: RunQueue, *, tell: Tell, until_empty: bool = False) -> None:
        """`tell`: called with a run, its new state, its place and the reason, where it begins and where it ends."""
        self._queue, self._tell, self._until_empty = queue, tell, until_empty
        self._begun: dict[str, QueuedRun] = {}
        for run in queue.runs():
            if run.state == RUNNING:  # of a process that has gone
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
    """A name for a file and for other machines: the one that a person knows, and a hash of the folder."""
    plain = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:NAME_CHARACTERS] or "run"
    return f"{plain}-{hashlib.sha256(str(path).encode()).hexdigest()[:ID_DIGITS]}"
