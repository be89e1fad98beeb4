"""The runs that a text file names, as a `JobSource`. Its owner edits the file while they are trained.

A line is the folder of a run, relative to the file; a comment begins with `#`, or with ` #` behind a folder. The first
run that waits begins first. A run whose line is gone is saved and given back.

Invariants
* A run's results are in its own folder. Only a run that fails here is known to this process alone.
* If the machine that trains a run goes away, the run waits again where it stands.
* A change of the file counts when two polls have read the same: an editor may have written half of it.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError, CuadrillaError
from cuadrilla.jobs.executor import Ended
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, read_object
from cuadrilla.runfile import read_run_config, read_run_file

WAITING, RUNNING, COMPLETE, FAILED, STOPPED = "waiting", "running", "complete", "failed", "stopped"
NAME_CHARACTERS, ID_DIGITS = 40, 8


@dataclass(kw_only=True)
class QueuedRun:
    """`line`: the run's folder as the file has it. `place`: the one that trains the run, or trained it last."""

    line: str
    run: RunDir
    state: str = WAITING
    place: str = ""
    reason: str = ""


class RunQueue:
    """The runs of a file. Used by one thread."""

    def __init__(self, file: Path, *, tell: Callable[[QueuedRun], None] = lambda _run: None) -> None:
        """`tell`: called when a run begins and when it ends. Raises ConfigError for a file that cannot be read."""
        self._file, self._tell = file, tell
        try:
            self._text = self._read()
        except OSError as error:
            hint = "write the folders of runs into it, one a line"
            raise ConfigError("cannot read {path}: {reason}", path=file, reason=error.strerror, hint=hint) from error
        self._runs: dict[str, QueuedRun] = {}
        """By job: those of the file in its order, then those that are trained although their lines are gone."""
        self._take(self._text)

    def table(self) -> list[dict[str, Any]]:
        return [
            {"run": run.line, "state": Message(run.state), "machine": run.place, "reason": run.reason}
            for run in self._runs.values()
        ]

    @property
    def is_done(self) -> bool:
        return all(run.state in (COMPLETE, FAILED) for run in self._runs.values())

    def next_job(self, place: str) -> str | None:
        for job, run in self._runs.items():
            if run.state == WAITING:
                self._note(run, RUNNING, place=place)
                return job
        return None

    def run_of(self, job: str) -> RunDir:
        return self._runs[job].run

    def ended(self, ended: Ended) -> None:
        run = self._runs[ended.job]
        if ended.complete or ended.reason:
            self._note(run, COMPLETE if ended.complete else FAILED, place=ended.place, reason=ended.reason)
        elif ended.job in self._named:
            run.state = WAITING
        else:
            del self._runs[ended.job]
            self._note(run, STOPPED, place=ended.place)

    def unwanted(self) -> list[str]:
        """Reads the file, too: once in each round of the loop."""
        with suppress(OSError):  # an editor replaces it
            before, self._text = self._text, self._read()
            if self._text == before:
                self._take(self._text)
        return [job for job, run in self._runs.items() if run.state == RUNNING and job not in self._named]

    def _read(self) -> str:
        return self._file.read_text(encoding="utf-8-sig", errors="replace")

    def _take(self, text: str) -> None:
        lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
        paths = {line: (self._file.parent / line).resolve() for line in lines if line and line[0] != "#"}
        self._named = {_job_of(path): QueuedRun(line=line, run=RunDir(path)) for line, path in paths.items()}
        known = {job: run for job, run in self._runs.items() if run.state == RUNNING or job in self._named}
        named = {job: known.pop(job) if job in known else self._checked(run) for job, run in self._named.items()}
        self._runs = named | known

    def _checked(self, run: QueuedRun) -> QueuedRun:
        """A run that is new in the file, with its state."""
        try:
            if _is_complete(run.run):
                self._note(run, COMPLETE)
        except CuadrillaError as error:
            self._note(run, FAILED, reason=error.message)
        return run

    def _note(self, run: QueuedRun, state: str, *, place: str = "", reason: str = "") -> None:
        run.state, run.place, run.reason = state, place, reason
        self._tell(run)


def _is_complete(run: RunDir) -> bool:
    """Whether it was trained to its end, and its run file asks for no more. Raises ConfigError."""
    wanted = read_run_file(run.path).config.train
    if read_object(run.status).get("state") != COMPLETE:
        return False
    trained = read_run_config(run).train
    return (wanted.tokens, wanted.epochs, wanted.steps) == (trained.tokens, trained.epochs, trained.steps)


def _job_of(path: Path) -> str:
    """A name for files and for other machines: the folder's name, which a person knows, and a hash of its path."""
    plain = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:NAME_CHARACTERS] or "run"
    return f"{plain}-{hashlib.sha256(str(path).encode()).hexdigest()[:ID_DIGITS]}"
