"""What hands out runs that a dashboard shows: the queue of this machine, and the searches of the runs that it shows.

Each is addressed by a key of ours, as runs are; no path comes from the page. What nobody has looked at for a while is
forgotten, and read anew when somebody does.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from cuadrilla.monitor.crew import RUNNING, state_of
from cuadrilla.monitor.jobs import QUEUE, SEARCH, JobNow, JobsReader, QueueReader, SearchReader
from cuadrilla.monitor.watch_jobs import WatchedJobs
from cuadrilla.monitor.web.runs import Runs
from cuadrilla.rundir import RunDir

MOST_OPEN = 8
OF_QUEUE = QUEUE
"""Its key; those of searches begin with another word."""


class Queues:
    """May be asked from any thread."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, WatchedJobs] = OrderedDict()

    def summaries(self) -> list[dict[str, Any]]:
        """A row for each; those that hand out now come first."""
        found = [
            {"key": key, "title": title, "running": state_of(RunDir(folder)) == RUNNING}
            for key, (title, folder) in self._folders().items()
        ]
        return sorted(found, key=lambda row: not row["running"])

    def watched(self, key: str) -> WatchedJobs | None:
        """Read up to now; None where there is none of that key."""
        _, folder = self._folders().get(key, ("", None))
        if folder is None:
            return None
        with self._lock:
            found = self._open.get(folder)
            if found is None:
                reader: JobsReader = QueueReader(folder) if key == OF_QUEUE else SearchReader(folder)
                found = self._open[folder] = WatchedJobs(reader, key_of=self._key_of)
            self._open.move_to_end(folder)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        found.refresh()
        return found

    def _folders(self) -> dict[str, tuple[str, Path]]:
        """Titles and folders, by key."""
        found = {OF_QUEUE: ("", queue)} if (queue := self._runs.queue) is not None and queue.is_dir() else {}
        return found | {f"{SEARCH} {key}": (key, folder) for key, folder in self._runs.searches().items()}

    def _key_of(self, job: JobNow) -> str:
        return "" if job.run is None else self._runs.key_of(job.run.path)
