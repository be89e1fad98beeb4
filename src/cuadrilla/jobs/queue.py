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

from cuadrilla.errors import ConfigError, CuadrillaError, LinkError
from cuadrilla.jobs.executor import Ended, Executor
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
    """Hands the runs of a queue out. Used by one thread; there is one for a queue."""

    def __init__(self, queue: RunQueue, executor: Executor, *, tell: Tell) -> None:
        """`tell`: called with a run, its new state, its place and the reason, where it begins and where it ends."""
        self._queue, self._executor, self._tell = queue, executor, tell
        self._preempted: set[str] = set()
        self._begun: dict[str, QueuedRun] = {}
        for run in queue.runs():
            if run.state == RUNNING:  # of a process that has gone
                queue.note(run, WAITING)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._executor.busy and all(run.state in ENDED for run in self._queue.runs())

    def step(self) -> None:
        """Take what has ended, preempt what is to stop, begin what can. Raises LinkError, ResourceError."""
        self.take_back()
        runs = self._queue.runs()
        for run in runs:
            if run.stops and run.state == RUNNING and run.name not in self._preempted:
                self._preempted.add(run.name)
                self._executor.preempt(run.name)
        for run in runs:
            if run.state == WAITING:
                self._try(run)

    def _try(self, run: QueuedRun) -> None:
        """Begin it at the first free place that it may have; or say that no machine is there that may train it."""
        places = self._executor.places
        suitable = [place for place, device in places.items() if run.suits(place, device=device)]
        free = self._executor.free
        if place := next((place for place in suitable if place in free), None):
            self._begin(run, place)
            return
        reason = "" if suitable else Message("no machine has joined that may train it")
        if reason != run.reason:
            self._queue.note(run, WAITING, place=run.place, reason=reason)

    def take_back(self) -> None:
        """Take the runs that have ended. Raises LinkError, ResourceError."""
        for ended in self._executor.poll():
            self._take(ended)

    def stop(self) -> None:
        """Have all save and give back; `take_back` hears of it."""
        for job in self._executor.busy.values():
            self._executor.preempt(job)

    def _begin(self, run: QueuedRun, place: str) -> None:
        try:
            self._executor.start(run.name, run.run, place=place)
        except LinkError:
            raise
        except CuadrillaError as error:
            self._note(run, FAILED, reason=error.message)
            return
        self._preempted.discard(run.name)
        self._begun[run.name] = run
        self._note(run, RUNNING, place=place)

    def _take(self, ended: Ended) -> None:
        run = self._begun[ended.job]
        if ended.complete:
            self._note(run, COMPLETE, place=ended.place)
        elif ended.reason:
            self._note(run, FAILED, place=ended.place, reason=ended.reason)
        elif run.name in self._preempted:
            self._note(run, STOPPED, place=ended.place)
        else:
            self._queue.note(run, WAITING, place=ended.place)

    def _note(self, run: QueuedRun, state: str, *, place: str = "", reason: str = "") -> None:
        self._queue.note(run, state, place=place, reason=reason)
        self._tell(run, state, place, reason)


def _name_of(path: Path) -> str:
    """A name for a file and for other machines: the one that a person knows, and a hash of the folder."""
    plain = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:NAME_CHARACTERS] or "run"
    return f"{plain}-{hashlib.sha256(str(path).encode()).hexdigest()[:ID_DIGITS]}"
