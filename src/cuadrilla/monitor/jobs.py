"""The runs of a queue, or the trials of a search, as their folders tell of them now: how each stands and who has it.

Nobody is asked. A queue is read from the files of `jobs/queue.py`, a search from its `trials.jsonl`, how far a run is
from its own rows. What has not changed is not read again: a second look costs what has been written since, and a
`stat` for each file. Machines that do jobs leave their rows in the same folder, so that `CrewReader` reads them.

All of it may have been written by anybody: numbers have ranges, and texts are one line of bounded length.
"""

import contextlib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from cuadrilla.home import Home, read_object
from cuadrilla.host.gpus import bounded
from cuadrilla.jobs.deal import ANY, Wants
from cuadrilla.jobs.queue import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, QueuedRun, RunQueue
from cuadrilla.monitor.crew import CrewMember, CrewNow, CrewReader, crew_data, state_of
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.nodes import MOST_NAME, MOST_TEXT, MOST_TIME, NodeNow, NodesReader
from cuadrilla.monitor.search_report import is_search
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, finite_json, read_regular
from cuadrilla.tune.folder import BEGUN, ENDED, LEFT, STARTED, SearchFolder
from cuadrilla.tune.search import Job

QUEUE, SEARCH = "queue", "search"
BITS = "val_bits_per_byte"
TAIL_BYTES = 2**16
"""Of a run's rows, at first: its newest figures are there."""
MOST_FILE_BYTES = 2**20
MOST_FILES = 20_000
MOST_STEPS, MOST_VALUE = 2**53, 1e300
MOST_TRIAL, MOST_RUNGS, MOST_VALUES = 100_000, 8, 20
SHOWN = ("state", "step", "steps", "loss", "bits_per_byte", "score", "reason", "began")
"""Of a job, as plain data."""
BETWEEN_PLACES = ", "
"""A run that several machines train together names them all."""

Looks = tuple[int, ...]
"""When a file was written last, its size, and which one it is; empty: it is not there."""


@dataclass(frozen=True, kw_only=True)
class JobNow:
    """A run of a queue, or a trial. Times are unix seconds. `name`: no other of its list has it. `title`: what a person
    calls it. `run`: None for a call of a function."""

    name: str
    title: str
    run: RunDir | None
    state: str
    place: str = ""
    """Who has it, or had it last; several: with ", " between them."""
    wants: Wants = ANY
    """Which machines may have it."""
    step: int | None = None
    steps: int | None = None
    """Of the whole run, where that can be known."""
    loss: float | None = None
    bits_per_byte: float | None = None
    """Of the held-out text, as last measured."""
    score: float | None = None
    """Of a trial that has ended."""
    values: str = ""
    """The settings of a trial."""
    reason: str = ""
    began: float | None = None
    """When it was begun, or gone on with, last."""

    @property
    def has_ended(self) -> bool:
        return self.state in (COMPLETE, FAILED, STOPPED)

    @property
    def places(self) -> list[str]:
        """Who has it now."""
        return self.place.split(BETWEEN_PLACES) if self.state == RUNNING and self.place else []


class JobsReader(Protocol):
    """Reads a queue or a search again and again. Used by one thread at a time."""

    @property
    def kind(self) -> str: ...

    @property
    def folder(self) -> Path:
        """As far as it has machines, a run directory."""

    @property
    def title(self) -> str:
        """What a person calls it; empty for the queue, of which a machine has one."""

    def read(self) -> list[JobNow]:
        """In their order. Never raises because of what the files hold."""


# How far a run is


@dataclass
class _Progress:
    """Of a run: its newest figures, and how long it is."""

    run: RunDir
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    bits_per_byte: float | None = None
    begun: float | None = None
    """When it was begun last: then its settings are written down."""
    _tokens: float | None = None
    _seen: Looks = ()
    _told: tuple[Looks, Looks] = ((), ())
    _section: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = FileFollower(self.run.metrics, tail_bytes=TAIL_BYTES)

    def read(self) -> "_Progress":
        looks = looks_of(self.run.metrics)
        more = looks != self._seen
        self._seen = looks
        while more:
            news = self._rows.read()
            if news.anew:
                self.step = self.loss = self.bits_per_byte = self._tokens = None
            for row in news.rows:
                self._take(row)
            more = news.more
        told = looks_of(self.run.config), looks_of(self.run.run_file)
        if told != self._told:
            self._told, self._section = told, _train_section(self.run)
            self.begun = _time_of(told[0])
        self.steps = self._steps()
        return self

    def _take(self, row: Mapping[str, Any]) -> None:
        step = bounded(row.get("version"), most=MOST_STEPS)
        if step is None:
            return
        self.bits_per_byte = _value(row.get(BITS), self.bits_per_byte)
        if "val_loss" in row and step < (self.step or 0):
            return  # what was found of a step long ago
        self.step, self._tokens = int(step), bounded(row.get("tokens"), most=MOST_STEPS)
        self.loss = _value(row.get("loss"), self.loss)

    def _steps(self) -> int | None:
        """As its settings say it; from tokens, once a step has told how many it has."""
        if steps := bounded(self._section.get("steps"), least=1, most=MOST_STEPS):
            return int(steps)
        tokens = bounded(self._section.get("tokens"), least=1, most=MOST_STEPS)
        if tokens and self.step and self._tokens:
            return -int(-tokens * self.step // self._tokens)
        return None


def _train_section(run: RunDir) -> Mapping[str, Any]:
    """With everything in it once the run has begun."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return _part(_part(finite_json(read_regular(run.config, most_bytes=MOST_FILE_BYTES)), "values"), "train")
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return _part(tomllib.loads(read_regular(run.run_file, most_bytes=MOST_FILE_BYTES).decode("utf-8-sig")), "train")
    return {}


# A queue


class QueueFiles:
    """The list of a queue; read again only when one of its files has changed. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._looks: dict[str, Looks] = {}
        self._runs: list[QueuedRun] = []
        self._now: dict[str, Looks] = {}

    def runs(self) -> list[QueuedRun]:
        """In their order."""
        looks = _looks_in(self.folder)
        if looks != self._looks:
            self._runs, self._looks = RunQueue(self.folder).runs(), looks
        return self._runs

    def changed(self, run: QueuedRun) -> float | None:
        """When it was written last how this one stands."""
        looks = self._looks.get(f"{run.name}.now.json")
        return looks[0] / 1e9 if looks else None


class QueueReader:
    """`cuadrilla queue`, on the machine that hands out."""

    kind = QUEUE
    title = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = QueueFiles(folder)
        self._progress: dict[str, _Progress] = {}

    def read(self) -> list[JobNow]:
        runs = self._files.runs()
        is_handed_out = state_of(RunDir(self.folder)) == RUNNING
        before, self._progress = self._progress, {}
        for run in runs:
            self._progress[run.name] = before.get(run.name) or _Progress(run.run)
        return [self._job(run, is_handed_out=is_handed_out) for run in runs]

    def _job(self, run: QueuedRun, *, is_handed_out: bool) -> JobNow:
        """Who has run for a process that has gone waits, as that process's successor will say."""
        far = self._progress[run.name].read()
        state = WAITING if run.state == RUNNING and not is_handed_out else run.state
        return JobNow(
            name=run.name,
            title=one_line(run.run.path.name, most=MOST_NAME),
            run=run.run,
            state=state,
            place=one_line(run.place, most=MOST_TEXT),
            wants=run.wants,
            step=far.step,
            steps=far.steps,
            loss=far.loss,
            bits_per_byte=far.bits_per_byte,
            reason=one_line(run.reason, most=MOST_TEXT),
            began=None if state == WAITING else far.begun or self._files.changed(run),
        )


# A search


@dataclass
class _Trial:
    """A run of a trial, as the rows of the search have it."""

    name: str
    run: RunDir
    values: str
    place: str = ""
    began: float | None = None
    was_left: bool = False
    """And nobody goes on with it yet."""
    ended: bool = False
    score: float | None = None
    bits_per_byte: float | None = None
    reason: str = ""
    far: _Progress | None = None
    """While it is under way, and no call of a function."""


class SearchReader:
    """`cuadrilla tune`, in the folder of the search, beside the run file."""

    kind = SEARCH

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._search = SearchFolder(folder)
        self.title = one_line(folder.resolve().parent.name, most=MOST_NAME)
        self._rows = FileFollower(self._search.trials)
        self._trials: dict[tuple[int, int], _Trial] = {}
        self._said: Mapping[str, Any] = {}
        self._looks: Looks = ()

    def read(self) -> list[JobNow]:
        looks = looks_of(self._search.search)
        if looks != self._looks:
            self._looks, self._said = looks, _read_object(self._search.search)
        more = True
        while more:
            news = self._rows.read()
            if news.anew:
                self._trials.clear()
            for row in news.rows:
                self._take(row)
            more = news.more
        is_searched = state_of(RunDir(self.folder)) == RUNNING
        return [self._job(key, trial, is_searched=is_searched) for key, trial in self._trials.items()]

    def _take(self, row: Mapping[str, Any]) -> None:
        kind = row.get("event")
        if kind == STARTED:  # nobody has what the process before had handed out
            for begun in self._trials.values():
                begun.was_left = True
        number = bounded(row.get("trial"), most=MOST_TRIAL)
        rung = bounded(row.get("rung"), most=MOST_RUNGS - 1)
        if kind not in (BEGUN, LEFT, ENDED) or number is None or rung is None:
            return
        job = Job(trial=int(number), rung=int(rung), values={})
        trial = self._trials.get(job.key)
        if trial is None:
            run = self._search.run(job)
            trial = self._trials[job.key] = _Trial(name=job.name, run=run, values=_values(row.get("values")))
        trial.place = _text(row.get("place")) or trial.place
        trial.was_left = kind == LEFT
        if kind == BEGUN:
            trial.began, trial.ended = bounded(row.get("time"), least=1.0, most=MOST_TIME), False
        if kind != ENDED:
            return
        trial.ended, trial.far = True, None
        trial.score, trial.reason = _value(row.get("score"), None), _text(row.get("reason"))
        trial.bits_per_byte = _value(_part(row, "figures").get(BITS), None)

    def _job(self, key: tuple[int, int], trial: _Trial, *, is_searched: bool) -> JobNow:
        """What has ended has said all in its row: a search may have thousands of them."""
        state, steps = self._state(trial, is_searched=is_searched), self._steps(key[1])
        far = None
        if not trial.ended and not self.is_of_calls:
            far = trial.far = (trial.far or _Progress(trial.run)).read()
        return JobNow(
            name=trial.name,
            title=trial.name,
            run=None if self.is_of_calls else trial.run,
            state=state,
            place=trial.place,
            step=far.step if far else steps if state == COMPLETE else None,
            steps=steps,
            loss=far.loss if far else None,
            bits_per_byte=far.bits_per_byte if far else trial.bits_per_byte,
            score=trial.score,
            values=trial.values,
            reason=trial.reason,
            began=None if state == WAITING else trial.began,
        )

    @property
    def is_of_calls(self) -> bool:
        """Of a function: nothing is trained."""
        return bool(_part(self._said, "identity").get("tune.function"))

    def _state(self, trial: _Trial, *, is_searched: bool) -> str:
        if trial.ended:
            return FAILED if trial.score is None else COMPLETE
        return WAITING if trial.was_left or not is_searched else RUNNING

    def _steps(self, rung: int) -> int | None:
        """Of a run there; of a call nobody knows."""
        told = None if self.is_of_calls else self._said.get("rung_steps")
        steps = bounded(told[rung], least=1, most=MOST_STEPS) if isinstance(told, list) and rung < len(told) else None
        return None if steps is None else int(steps)


def open_jobs(folder: Path, *, queue: Path) -> JobsReader | None:
    """What a coordinator of this machine hands out in `folder`; None where that is one run. `queue`: this machine's."""
    if folder == queue:
        return QueueReader(folder)
    return SearchReader(folder) if is_search(folder) else None


# With its machines


class LentMachines:
    """Of jobs that several machines do together: these tell that run how they are, for as long as it has them."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeNow] = {}
        self._readers: dict[str, NodesReader] = {}

    def read(self, jobs: Sequence[JobNow]) -> Mapping[str, NodeNow]:
        """By name."""
        before, self._readers, self.nodes = self._readers, {}, {}
        for job in jobs:
            if len(job.places) > 1 and job.run is not None:
                reader = self._readers[job.name] = before.get(job.name) or NodesReader(job.run)
                places = {one_line(place, most=MOST_NAME) for place in job.places}
                self.nodes |= {node.name: node for node in reader.read() if node.name in places}
        return self.nodes


@dataclass(frozen=True, kw_only=True)
class WorkNow:
    """A queue or a search at `machines.time`. `machines`: those that have joined, and whoever has a job beside them."""

    kind: str
    title: str
    jobs: Sequence[JobNow]
    machines: CrewNow

    @property
    def is_handed_out(self) -> bool:
        return self.machines.state == RUNNING

    @property
    def num_ended(self) -> int:
        return sum(job.has_ended for job in self.jobs)


@dataclass
class WorkReader:
    """Both, read together."""

    reader: JobsReader

    def __post_init__(self) -> None:
        self._crew, self._lent = CrewReader(RunDir(self.reader.folder)), LentMachines()

    def read(self, *, now: float) -> WorkNow:
        jobs = self.reader.read()
        lent = self._lent.read(jobs)
        crew = self._crew.read(now=now)
        has = jobs_by_place(jobs, name=_how_far)
        known = {member.name: member for member in crew.members}
        for name, told in has.items():
            known[name] = _with_job(
                known.get(name) or CrewMember(name=name, here=True, node=NodeNow(name=name)), told, lent
            )
        members = sorted(map(_alone, known.values()), key=lambda member: not member.here)
        return WorkNow(
            kind=self.reader.kind,
            title=self.reader.title,
            jobs=jobs,
            machines=replace(crew, members=tuple(members)),
        )


@dataclass
class HandedOut:
    """What the coordinator of this machine hands out now, looked at again and again."""

    home: Home
    _reader: WorkReader | None = None

    def read(self, *, now: float) -> WorkNow | None:
        """None: there is none, or all its machines train one run."""
        folder = read_object(self.home.open_file).get("run")
        if not isinstance(folder, str):
            return None
        if self._reader is None or self._reader.reader.folder != Path(folder):
            jobs = open_jobs(Path(folder), queue=self.home.queue)
            self._reader = None if jobs is None else WorkReader(jobs)
        work = None if self._reader is None else self._reader.read(now=now)
        return work if work is not None and work.is_handed_out else None


def jobs_by_place(jobs: Sequence[JobNow], *, name: Callable[[JobNow], str]) -> dict[str, list[str]]:
    """Which jobs each machine has now."""
    found: dict[str, list[str]] = {}
    for job in jobs:
        for place in job.places:
            found.setdefault(one_line(place, most=MOST_NAME), []).append(name(job))
    return found


def work_data(now: WorkNow) -> dict[str, Any]:
    """As plain data: what `cuadrilla monitor --json` adds while this machine hands out jobs (docs/monitor.md)."""
    crew = crew_data(now.machines)
    jobs = [
        {
            "name": job.title,
            "run": None if job.run is None else str(job.run.path),
            "machine": job.place,
            **{key: getattr(job, key) for key in SHOWN},
        }
        for job in now.jobs
    ]
    has = jobs_by_place(now.jobs, name=lambda job: job.title)
    machines = [{**machine, "jobs": has.get(machine["name"], [])} for machine in crew["machines"]]
    return {"kind": now.kind, "name": now.title, "state": crew["state"], "jobs": jobs, "machines": machines}


def _with_job(member: CrewMember, jobs: Sequence[str], lent: Mapping[str, NodeNow]) -> CrewMember:
    """It is here, also if it has left the others for a run of several machines."""
    found = replace(member, here=True, job=BETWEEN_PLACES.join(jobs))
    if (node := lent.get(member.name)) is None:
        return found
    return replace(found, node=node, seen=node.heard, word=node.log[-1] if node.log else None)


def _alone(member: CrewMember) -> CrewMember:
    """Nobody has a share of what each does for itself."""
    return replace(member, share=None, tokens_per_second=None)


def _how_far(job: JobNow) -> str:
    if job.step is None:
        return job.title
    return f"{job.title} {job.step}/{job.steps}" if job.steps else f"{job.title} {job.step}"


# What anybody may have written


def looks_of(path: Path) -> Looks:
    with contextlib.suppress(OSError):
        return _looks(path.stat())
    return ()


def _looks_in(folder: Path) -> dict[str, Looks]:
    """Of the files of a queue, by name."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, MOST_FILES):
            if entry.name.endswith(".json"):
                with contextlib.suppress(OSError):
                    found[entry.name] = _looks(entry.stat())
    return found


def _looks(status: os.stat_result) -> Looks:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _time_of(looks: Looks) -> float | None:
    return looks[0] / 1e9 if looks else None


def _read_object(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return _part({"": finite_json(read_regular(path, most_bytes=MOST_FILE_BYTES))}, "")
    return {}


def _part(values: object, key: str) -> dict[str, Any]:
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, dict) else {}


def _values(value: object) -> str:
    """A combination of settings in one line."""
    told = value.items() if isinstance(value, dict) else ()
    shown = (
        f"{key}={each:.4g}" if isinstance(each, float) else f"{key}={each}" for key, each in islice(told, MOST_VALUES)
    )
    return one_line("  ".join(shown), most=MOST_TEXT)


def _text(value: object) -> str:
    return one_line(value, most=MOST_TEXT) if isinstance(value, str) else ""


def _value(value: object, otherwise: float | None) -> float | None:
    found = bounded(value, least=-MOST_VALUE, most=MOST_VALUE)
    return otherwise if found is None else found
