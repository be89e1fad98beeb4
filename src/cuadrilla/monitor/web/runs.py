"""Which runs a dashboard shows: run folders that were named, those in folders that were named, and those of the queue.

A run is addressed by its key, a name of ours, and so is what hands out runs: the queue, a search. No path comes from
the page. Only what somebody looks at is kept in memory, the `MAX_OPEN` that were looked at last. Searches are found
beside their runs; their trials may be many, so that none is in the list, and each can be looked at.
"""

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from cuadrilla.errors import ConfigError
from cuadrilla.jobs.queue import RunQueue
from cuadrilla.monitor.jobs import QUEUE, SEARCH, JobsReader, QueueReader, SearchReader
from cuadrilla.monitor.nodes import MAX_NAME
from cuadrilla.monitor.run import RUNNING, RunReader, short, state_of
from cuadrilla.monitor.watch_jobs import WatchedJobs
from cuadrilla.rundir import RunDir
from cuadrilla.tune.folder import SearchFolder

MAX_RUNS = 500
MAX_OPEN, MAX_OPEN_JOBS = 24, 8
MAX_LOOKED_AT = 2000
"""Of what is in one folder."""
LOOK_SECONDS = 3.0
NAMES = ("metrics.jsonl", "status.json", "config.json", "run.toml")
TUNE = "tune"
W = TypeVar("W")
TRIAL = re.compile(r"t[0-9]{4,6}-r[0-9]")


class Runs:
    """May be asked from any thread."""

    def __init__(self, places: Sequence[Path], *, queue: Path | None = None) -> None:
        """`queue`: the folder of this machine's, if it is to be shown."""
        self.queue = queue
        self._places = [place.parent if place.is_file() else place for place in places]
        for place in self._places:
            if not place.is_dir():
                raise ConfigError(
                    "{path} is not a folder", path=place, hint="name a run folder, or a folder that holds some"
                )
        self._lock = threading.Lock()
        self._paths: dict[str, Path] = {}
        self._keys: dict[Path, str] = {}
        self._searches: dict[str, Path] = {}
        self._looked = float("-inf")
        self._open: OrderedDict[Path, RunReader] = OrderedDict()
        self._open_jobs: OrderedDict[Path, WatchedJobs] = OrderedDict()
        self._ended: dict[Path, tuple[tuple[float, ...], dict[str, Any]]] = {}
        """Rows of runs that have ended, and what their files looked like then: they need not be read again."""

    def names(self) -> list[str]:
        """Those that are there now, the one that wrote last first; then those that only the queue names."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_SECONDS:
                queued = [run.run.path for run in RunQueue(self.queue).runs()] if self.queue is not None else []
                self._paths = _keyed(self._places, queued)
                self._keys = {path: key for key, path in self._paths.items()}
                self._searches = _searches(self._paths, self._places)
                self._looked = time.monotonic()
            return list(self._paths)

    def key_of(self, path: Path) -> str:
        """What the run in this folder is called here, also if it is a trial; empty: it is not shown."""
        self.names()
        if key := self._keys.get(path):
            return key
        of = next((key for key, folder in self._searches.items() if folder == path.parent), None)
        return f"{of}/{path.name}" if of is not None and TRIAL.fullmatch(path.name) and is_run(path) else ""

    def _path(self, key: str) -> Path | None:
        """Of a run in the list, or of a trial."""
        of, _, name = key.rpartition("/")
        if key in self._paths or of not in self._searches or not TRIAL.fullmatch(name):
            return self._paths.get(key)
        path = self._searches[of] / name
        return path if is_run(path) else None

    def watched(self, key: str) -> RunReader | None:
        """Read up to now; None where there is no such run."""
        self.names()
        with self._lock:
            path = self._path(key)
            if path is None:
                return None
            found = _kept(self._open, path, lambda: RunReader(RunDir(path)), most=MAX_OPEN)
        found.refresh()
        return found

    def watched_jobs(self, key: str) -> WatchedJobs | None:
        """The queue or a search, read up to now; None where there is none of that key."""
        _, folder = self._handing_out().get(key, ("", None))
        if folder is None:
            return None

        def opened() -> WatchedJobs:
            reader: JobsReader = QueueReader(folder) if key == QUEUE else SearchReader(folder)
            return WatchedJobs(reader, key_of=lambda job: self.key_of(job.run.path))

        with self._lock:
            found = _kept(self._open_jobs, folder, opened, most=MAX_OPEN_JOBS)
        found.refresh()
        return found

    def jobs_summaries(self) -> list[dict[str, Any]]:
        """A row for each queue or search; those that hand out now come first."""
        found = [
            {"key": key, "title": title, "running": state_of(RunDir(folder)) == RUNNING}
            for key, (title, folder) in self._handing_out().items()
        ]
        return sorted(found, key=lambda row: not row["running"])

    def _handing_out(self) -> dict[str, tuple[str, Path]]:
        """Titles and folders, by key: searches by that of the run that each is beside, or by its name."""
        self.names()
        found = {QUEUE: ("", queue)} if (queue := self.queue) is not None and queue.is_dir() else {}
        return found | {f"{SEARCH} {key}": (key, folder) for key, folder in self._searches.items()}

    def summaries(self) -> list[dict[str, Any]]:
        """A row for each run."""
        rows = ((key, self._summary(key)) for key in self.names())
        return [{"key": key, **row} for key, row in rows if row is not None]

    def _summary(self, key: str) -> dict[str, Any] | None:
        path = self._paths.get(key)
        if path is None:
            return None
        looks = tuple(_looks(path / name) for name in NAMES)
        before = self._ended.get(path)
        if before is not None and before[0] == looks:
            return before[1]
        watched = self.watched(key)
        if watched is None:
            return None
        here = sum(machine.here and machine.works for machine in watched.machines())
        row = {"state": watched.state, "updated": watched.updated, "here": here, **watched.last}
        if not watched.is_running and not watched.is_behind:
            self._ended[path] = (looks, row)
        return row


def _kept(kept: OrderedDict[Path, W], path: Path, make: Callable[[], W], *, most: int) -> W:
    """What is open of a folder; the `most` that were asked for last stay open."""
    found = kept[path] = kept.pop(path, None) or make()
    while len(kept) > most:
        kept.popitem(last=False)
    return found


def _keyed(places: Sequence[Path], queued: Sequence[Path]) -> dict[str, Path]:
    """By a name that tells them apart: of the folder, or of it and the one that it is in."""
    found = sorted({path.resolve(): None for place in places for path in _found(place)}, key=_age)
    more = sorted(filter(is_run, queued), key=_age)
    keyed: dict[str, Path] = {}
    for path in list(dict.fromkeys([*found, *more]))[:MAX_RUNS]:
        keyed[next(name for name in _names_of(path) if name not in keyed)] = path
    return keyed


def _names_of(path: Path) -> list[str]:
    """What a folder may be called, the best first."""
    names = (path.name, f"{path.parent.name}/{path.name}", *(f"{path.name} ({n})" for n in range(2, MAX_RUNS + 2)))
    return [short(name, most=MAX_NAME) for name in names]


def _found(place: Path) -> Iterator[Path]:
    """Itself, or those in it and in its folders."""
    if is_run(place):
        yield place
        return
    for folder in _folders(place):
        if is_run(folder):
            yield folder
        else:
            yield from filter(is_run, _folders(folder))


def _searches(runs: Mapping[str, Path], places: Sequence[Path]) -> dict[str, Path]:
    """Beside the runs, and those that were named themselves."""
    found = {key: path / TUNE for key, path in runs.items() if _holds_search(path / TUNE)}
    for place in map(Path.resolve, places):
        if _holds_search(place) and place not in found.values():
            found[next(key for key in _names_of(place.parent) if key not in found)] = place
    return found


def _holds_search(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return SearchFolder(folder).exists
    return False


def _folders(place: Path) -> list[Path]:
    """None of one that may not be looked into."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        names = [entry.name for entry in islice(entries, MAX_LOOKED_AT) if entry.is_dir()]
        return [place / name for name in sorted(names) if not name.startswith(".")]
    return []


def is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any((folder / name).is_file() for name in NAMES)
    return False


def _age(path: Path) -> float:
    return -_looks(path / NAMES[0])


def _looks(path: Path) -> float:
    """When it was written last; 0 where it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
