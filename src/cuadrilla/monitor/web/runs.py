"""The runs that a dashboard shows: the named run folders, and the runs in named folders.

The page addresses a run by its key, a name that we give it; the page never sends a path. A search is read like a run,
and its trials are runs.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.monitor.follow import newest_figures
from cuadrilla.monitor.run import RunReader, is_run, modified, open_run, state_of
from cuadrilla.rundir import RunDir, is_held, read_object
from cuadrilla.tune.folder import TUNE

MAX_RUNS, MAX_OPEN = 500, 50
LOOK_SECONDS = 3.0


class Runs:
    """The runs by key. Thread-safe."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = [RunDir(place).path for place in places]
        for place in self._places:
            if not place.is_dir():
                hint = "name a run folder, or a folder that holds some"
                raise ConfigError("{path} is not a folder", path=place, hint=hint)
        self._paths: dict[str, Path] = {}
        self._looked = float("-inf")
        self._open = lru_cache(MAX_OPEN)(open_run)

    def paths(self) -> dict[str, Path]:
        """The folders of the runs found, by key, the one written last first."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._paths, self._looked = self._find(), time.monotonic()
        return self._paths

    def watched(self, key: str) -> RunReader | None:
        """The reader of a run; None if there is no such run."""
        path = self.paths().get(key)
        return None if path is None else self._open(path)

    def summaries(self) -> list[dict[str, Any]]:
        """A row for each run, from the end of its files. `stops`: `stop` works."""
        return [_summary(key, RunDir(path)) for key, path in self.paths().items()]

    def stop(self, key: str) -> bool:
        """Ask the process that trains a run to save and stop, like `cuadrilla stop`. Returns whether there is one."""
        path = self.paths().get(key)
        if path is None or (process := _process_of(RunDir(path))) is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGTERM)
            return True
        return False

    def _find(self) -> dict[str, Path]:
        found = {path.resolve() for place in self._places for path in _found(place)}
        keyed: dict[str, Path] = {}
        for path in sorted(found, key=_newest_first)[:MAX_RUNS]:
            keyed[next(name for name in _names_of(path) if name not in keyed)] = path
        return keyed


def _summary(key: str, run: RunDir) -> dict[str, Any]:
    more = {"stops": _process_of(run) is not None, "updated": modified(run.metrics)}
    return {**newest_figures(run.metrics), "key": key, "state": state_of(run), **more}


def _process_of(run: RunDir) -> int | None:
    """The pid of the process here that trains a run."""
    owner, pid = read_object(run.lock), read_object(run.status).get("pid")
    is_here = (owner.get("host"), owner.get("pid")) == (socket.gethostname(), pid)
    return pid if is_here and is_held(run.lock) else None


def _names_of(path: Path) -> list[str]:
    """The keys that a folder may have, the best first. That of a search or a trial begins with its run."""
    least = 2 if path.name == TUNE else 3 if path.parent.name == TUNE else 1
    short, long = ("/".join(path.parts[-count:]) for count in (least, least + 1))
    return [short, long, *(f"{long} ({number})" for number in range(2, MAX_RUNS + 2))]


def _found(place: Path, *, depth: int = 2) -> Iterator[Path]:
    """The folder itself if it is a run, with its search and the trials; else the runs in its folders, so deep."""
    if is_run(place):
        yield place
        yield from filter(is_run, _folders(place)) if place.name == TUNE else _found(place / TUNE, depth=0)
    elif depth:
        for folder in _folders(place):
            yield from _found(folder, depth=depth - 1)


def _folders(place: Path) -> list[Path]:
    """Its visible folders; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return [path for path in place.iterdir() if path.is_dir() and path.name[0] != "."]
    return []


def _newest_first(path: Path) -> float:
    run = RunDir(path)
    return -max(modified(run.metrics), modified(run.events))
