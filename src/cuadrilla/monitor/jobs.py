"""The trials of a search, read from its folder; and the right reader for a folder.

A job is plain data: `name` (unique in its list), `title`, `run` (its folder), `state`, `machine` (the one that trains
it, or trained it last), `step`, `steps`, `loss`, `val_bits_per_byte`, `score`, `values`, `reason`.
"""

from functools import partial
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.monitor.follow import newest_figures
from cuadrilla.monitor.run import COMPLETE, RUNNING, WAITING, RunReader
from cuadrilla.rundir import RunDir, read_object
from cuadrilla.tune.folder import JOBS


def open_run(folder: Path, *, tail_bytes: int | None = None) -> RunReader:
    """The reader of a run or of a search. Raises ConfigError if the folder is neither."""
    run = RunDir(folder)
    if (folder / JOBS).is_file():
        return RunReader(run, jobs=partial(search_jobs, folder))
    if not is_run(folder):
        raise ConfigError("{path} is no run", path=folder, hint="name a run folder, or its run.toml")
    return RunReader(run, tail_bytes=tail_bytes)


def is_run(folder: Path) -> bool:
    run = RunDir(folder)
    return any(path.is_file() for path in (run.metrics, run.status, run.events, run.run_file))


def search_jobs(folder: Path, is_searched: bool) -> list[dict[str, Any]]:
    """The trials of a search, of which there may be thousands: only the folders of running ones are read."""
    found = []
    for row in read_object(folder / JOBS).get("jobs", []):
        run, is_running = RunDir(folder / row["name"]), row["state"] == RUNNING
        more = _progress(run) if is_running else {"step": row["steps"]} if row["state"] == COMPLETE else {}
        state = {"state": WAITING} if is_running and not is_searched else {}
        found.append({**row, "title": row["name"], "run": str(run.path), **more, "steps": row["steps"], **state})
    return found


def _progress(run: RunDir) -> dict[str, Any]:
    """The progress of a run, from its newest rows and its settings."""
    last, steps = newest_figures(run.metrics), read_object(run.config).get("num_steps")
    figures = {key: last.get(key) for key in ("loss", "val_bits_per_byte")}
    return {"step": last.get("version"), "steps": steps, **figures}
