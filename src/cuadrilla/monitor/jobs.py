"""The runs of a queue, or the trials of a search, as their folders tell of them now: how each stands and who has it.

Nobody is asked. A queue is read from the files of `jobs/queue.py`, a search from its `trials.jsonl`, how far a run is
from its own rows. What has not changed is not read again: a second look costs what has been written since, and a
`stat` for each file. Machines that do jobs leave their rows in the same folder, so that `RunReader` reads them.

All of it may have been written by anybody: numbers have ranges, and texts are one line of bounded length.
"""

import contextlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from cuadrilla.home import Home, read_object
from cuadrilla.host.gpus import bounded
from cuadrilla.jobs.deal import ANY, Wants
from cuadrilla.jobs.queue import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, QueuedRun, RunQueue
from cuadrilla.link.base import node_of
from cuadrilla.monitor.about import object_of, part_of
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.nodes import MAX_NAME, MAX_TEXT, MAX_TIME, NodeNow
from cuadrilla.monitor.run import TAIL_BYTES, Machine, RunNow, RunReader, run_data, state_of
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, read_regular
from cuadrilla.tune.folder import BEGUN, ENDED, LEFT, STARTED, SearchFolder
from cuadrilla.tune.search import Job

QUEUE, SEARCH = "queue", "search"
BITS = "val_bits_per_byte"
PROGRESS_BYTES = 2**16
"""Of a run's rows, at first: its newest figures are there."""
MAX_STEPS, MAX_VALUE = 2**53, 1e300
MAX_TRIAL, MAX_RUNGS, MAX_VALUES = 100_000, 8, 20
SHOWN = ("state", "step", "steps", "loss", "bits_per_byte", "score", "reason", "began")
"""Of a job, as plain data."""


@dataclass(frozen=True, kw_only=True)
class JobNow:
    """A run of a queue, or a trial. Times are unix seconds. `name`: no other of its list has it. `title`: what a person
    calls it."""

    name: str
    title: str
    run: RunDir
    state: str
    place: str = ""
    """Who has it, or had it last."""
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


class _Progress:
    """Of a run: its newest figures, and how long it is. `begun`: when it was begun last, as its settings were written
    then."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.begun: float | None = None
        self._rows = RunReader(run, tail_bytes=PROGRESS_BYTES)
        self._changed: tuple[float | None, ...] = ()
        self._section: Mapping[str, Any] = {}

    def read(self) -> "_Progress":
        self._rows.take_rows()
        changed = (_changed(self.run.config), _changed(self.run.run_file))
        if changed != self._changed:
            self._changed, self.begun = changed, changed[0]
            self._section = _train_section(self.run)
        return self

    @property
    def figures(self) -> dict[str, Any]:
        """Of a `JobNow`."""
        step = self._rows.last.get("version")
        return {
            "step": None if step is None else int(step),
            "steps": self._steps(),
            "loss": self._rows.last.get("loss"),
            "bits_per_byte": self._rows.last.get(BITS),
        }

    def _steps(self) -> int | None:
        """As its settings say it; from tokens, once a step has told how many it has."""
        if steps := bounded(self._section.get("steps"), least=1, most=MAX_STEPS):
            return int(steps)
        tokens = bounded(self._section.get("tokens"), least=1, most=MAX_STEPS)
        step, done = self._rows.last.get("version"), self._rows.last.get("tokens")
        return -int(-tokens * step // done) if tokens and step and done else None


def _train_section(run: RunDir) -> Mapping[str, Any]:
    """With everything in it once the run has begun."""
    if config := object_of(run.config):
        return part_of(part_of(config, "values"), "train")
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return part_of(tomllib.loads(read_regular(run.run_file).decode("utf-8-sig")), "train")
    return {}


# A queue


class QueueReader:
    """`cuadrilla queue`, on the machine that hands out."""

    kind = QUEUE
    title = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._queue = RunQueue(folder)
        self._progress: dict[str, _Progress] = {}

    def read(self) -> list[JobNow]:
        runs = self._queue.runs()
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
            title=one_line(run.run.path.name, most=MAX_NAME),
            run=run.run,
            state=state,
            place=one_line(run.place, most=MAX_TEXT),
            wants=run.wants,
            **far.figures,
            reason=one_line(run.reason, most=MAX_TEXT),
            began=None if state == WAITING else far.begun or _changed(self.folder / f"{run.name}.now.json"),
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
    """While it is under way."""


class SearchReader:
    """`cuadrilla tune`, in the folder of the search, beside the run file."""

    kind = SEARCH

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._search = SearchFolder(folder)
        self.title = one_line(folder.resolve().parent.name, most=MAX_NAME)
        self._rows = FileFollower(self._search.trials)
        self._trials: dict[tuple[int, int], _Trial] = {}
        self._said: Mapping[str, Any] = {}

    def read(self) -> list[JobNow]:
        self._said = object_of(self._search.search)
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
        number = bounded(row.get("trial"), most=MAX_TRIAL)
        rung = bounded(row.get("rung"), most=MAX_RUNGS - 1)
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
            trial.began, trial.ended = bounded(row.get("time"), least=1.0, most=MAX_TIME), False
        if kind != ENDED:
            return
        trial.ended, trial.far = True, None
        trial.score, trial.reason = _value(row.get("score"), None), _text(row.get("reason"))
        trial.bits_per_byte = _value(part_of(row, "figures").get(BITS), None)

    def _job(self, key: tuple[int, int], trial: _Trial, *, is_searched: bool) -> JobNow:
        """What has ended has said all in its row: a search may have thousands of them."""
        state, steps = self._state(trial, is_searched=is_searched), self._steps(key[1])
        figures: dict[str, Any] = {"step": steps if state == COMPLETE else None, "bits_per_byte": trial.bits_per_byte}
        if not trial.ended:
            trial.far = (trial.far or _Progress(trial.run)).read()
            figures = trial.far.figures
        return JobNow(
            name=trial.name,
            title=trial.name,
            run=trial.run,
            state=state,
            place=trial.place,
            **figures | {"steps": steps},
            score=trial.score,
            values=trial.values,
            reason=trial.reason,
            began=None if state == WAITING else trial.began,
        )

    def _state(self, trial: _Trial, *, is_searched: bool) -> str:
        if trial.ended:
            return FAILED if trial.score is None else COMPLETE
        return WAITING if trial.was_left or not is_searched else RUNNING

    def _steps(self, rung: int) -> int | None:
        """Of a run there."""
        told = self._said.get("rung_steps")
        steps = bounded(told[rung], least=1, most=MAX_STEPS) if isinstance(told, list) and rung < len(told) else None
        return None if steps is None else int(steps)


def open_jobs(folder: Path, *, queue: Path) -> JobsReader | None:
    """What a coordinator of this machine hands out in `folder`; None where that is one run. `queue`: this machine's."""
    if folder == queue:
        return QueueReader(folder)
    return SearchReader(folder) if SearchFolder(folder).exists else None


# With its machines


@dataclass(frozen=True, kw_only=True)
class WorkNow:
    """A queue or a search at `machines.time`. `machines`: those that have joined, and whoever has a job beside them.
    `jobs_of`: what each has now, by its name."""

    kind: str
    title: str
    jobs: Sequence[JobNow]
    machines: RunNow
    jobs_of: Mapping[str, Sequence[JobNow]] = field(default_factory=dict)

    @property
    def is_handed_out(self) -> bool:
        return self.machines.state == RUNNING

    @property
    def num_ended(self) -> int:
        return sum(job.has_ended for job in self.jobs)


@dataclass
class WorkReader:
    """Both, read together. `run`: the machines; their shares say nothing, as each works for itself."""

    reader: JobsReader

    def __post_init__(self) -> None:
        self.run = RunReader(RunDir(self.reader.folder))

    def read(self, *, now: float) -> WorkNow:
        jobs = self.reader.read()
        machines = self.run.read(now=now)
        has: dict[str, list[JobNow]] = {}
        for job in jobs:
            if job.state == RUNNING and job.place:
                has.setdefault(one_line(job.place, most=MAX_NAME), []).append(job)
        known = {machine.name: machine for machine in machines.machines}
        for name, told in has.items():
            machine = known.get(name) or Machine(name=name, here=True, node=NodeNow(name=name))
            known[name] = replace(machine, here=True, job=", ".join(map(_how_far, told)))
        alone = [replace(machine, share=None, tokens_per_second=None) for machine in known.values()]
        return WorkNow(
            kind=self.reader.kind,
            title=self.reader.title,
            jobs=jobs,
            machines=replace(machines, machines=tuple(sorted(alone, key=lambda machine: not machine.here))),
            jobs_of=has,
        )


@dataclass
class OwnCrew:
    """The crew that this machine coordinates, looked at again and again."""

    home: Home
    _folder: str = ""
    _reader: RunReader | WorkReader | None = None

    def read(self, nodes: Collection[str], *, now: float) -> RunNow | WorkNow | None:
        """What it does now, with those of its `nodes` that are not there; None: nothing."""
        folder = read_object(self.home.open_file).get("run")
        if not isinstance(folder, str):
            return None
        if folder != self._folder:
            jobs = open_jobs(Path(folder), queue=self.home.queue)
            self._reader = RunReader(RunDir(Path(folder)), tail_bytes=TAIL_BYTES) if jobs is None else WorkReader(jobs)
            self._folder = folder
        assert self._reader is not None
        found = self._reader.read(now=now)
        machines = found if isinstance(found, RunNow) else found.machines
        if machines.state != RUNNING:
            return None
        machines = _with_nodes(machines, nodes, paused=self.home.paused_nodes)
        return machines if isinstance(found, RunNow) else replace(found, machines=machines)


def _with_nodes(now: RunNow, nodes: Collection[str], *, paused: Collection[str]) -> RunNow:
    known = {node_of(machine.name) for machine in now.machines}
    away = [Machine(name=name, here=False, node=NodeNow(name=name)) for name in sorted(set(nodes) - known)]
    machines = [replace(machine, paused=node_of(machine.name) in paused) for machine in [*now.machines, *away]]
    return replace(now, machines=tuple(machines))


def work_data(now: WorkNow) -> dict[str, Any]:
    """As plain data: what `cuadrilla monitor --json` adds while this machine hands out jobs (docs/monitor.md)."""
    crew = run_data(now.machines)
    jobs = [
        {
            "name": job.title,
            "run": str(job.run.path),
            "machine": job.place,
            **{key: getattr(job, key) for key in SHOWN},
        }
        for job in now.jobs
    ]
    machines = [
        {**machine, "jobs": [job.title for job in now.jobs_of.get(machine["name"], ())]} for machine in crew["machines"]
    ]
    return {"kind": now.kind, "name": now.title, "state": crew["state"], "jobs": jobs, "machines": machines}


def _how_far(job: JobNow) -> str:
    if job.step is None:
        return job.title
    return f"{job.title} {job.step}/{job.steps}" if job.steps else f"{job.title} {job.step}"


# What anybody may have written


def _changed(path: Path) -> float | None:
    """When a file was written last; None: it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _values(value: object) -> str:
    """A combination of settings in one line."""
    told = value.items() if isinstance(value, dict) else ()
    shown = (
        f"{key}={each:.4g}" if isinstance(each, float) else f"{key}={each}" for key, each in islice(told, MAX_VALUES)
    )
    return one_line("  ".join(shown), most=MAX_TEXT)


def _text(value: object) -> str:
    return one_line(value, most=MAX_TEXT) if isinstance(value, str) else ""


def _value(value: object, otherwise: float | None) -> float | None:
    found = bounded(value, least=-MAX_VALUE, most=MAX_VALUE)
    return otherwise if found is None else found
