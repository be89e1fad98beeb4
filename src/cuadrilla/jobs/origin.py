"""Whose the checkpoints of a job are: those that came from other machines are remembered in its folder.

Their bytes are verified when they come; whether a training can go on from them shows only when somebody tries. Where
that fails, all that the same machine has left is set aside, and the job goes on from what was there before.
"""

import shutil
from pathlib import Path

from cuadrilla.home import read_object
from cuadrilla.rundir import RunDir, storage_errors, write_json
from cuadrilla.train.checkpoint import list_checkpoints, set_aside, version_of

ORIGINS = "origins.json"
"""In a job's folder: the machines that have sent its checkpoints."""
HERE = ""
"""This machine."""


def note_origin(run: RunDir, *, version: int, worker: str) -> None:
    """Raises ResourceError."""
    there = {version_of(path) for path in list_checkpoints(run.checkpoints)}
    known = {each: whose for each, whose in _origins(run).items() if each in there}
    _write(run, known | {version: worker})


def hand_on_origin(before: RunDir, run: RunDir, *, version: int) -> None:
    """Of a checkpoint that was copied from one run into another. Raises ResourceError."""
    if whose := _origins(before).get(version, HERE):
        note_origin(run, version=version, worker=whose)


def left_by(run: RunDir) -> str | None:
    """Whose the newest checkpoint is; None: there is none."""
    there = list_checkpoints(run.checkpoints)
    return _origins(run).get(version_of(there[-1]), HERE) if there else None


def set_aside_of(run: RunDir, worker: str) -> None:
    """All that this machine has left. Raises ResourceError."""
    known = _origins(run)
    with storage_errors(run.checkpoints):
        for path in list_checkpoints(run.checkpoints):
            if known.get(version_of(path), HERE) == worker:
                set_aside(path)
    _write(run, {version: whose for version, whose in known.items() if whose != worker})


def forget_set_aside(run: RunDir) -> None:
    """The run is complete without it."""
    for path in run.checkpoints.glob(".v*.damaged"):
        shutil.rmtree(path, ignore_errors=True)


def _origins(run: RunDir) -> dict[int, str]:
    found = read_object(run.path / ORIGINS).get("machines")
    known = found.items() if isinstance(found, dict) else ()
    return {int(version): str(whose) for version, whose in known if version.isascii() and version.isdigit()}


def _write(run: RunDir, origins: dict[int, str]) -> None:
    path: Path = run.path / ORIGINS
    write_json(path, {"machines": {str(version): whose for version, whose in origins.items()}}, private=True)
