"""One search, from its run file to its best trial: asks `Search` what is next, and has places do it.

Whatever ends this process, the same command goes on: finished trials are in `trials.jsonl`, others in checkpoints.
"""

import math
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cuadrilla.config import Config, FileTaskSection, TuneSection
from cuadrilla.engines.calls import REQUEST
from cuadrilla.errors import ConfigError, DataError, ResourceError, TaskError
from cuadrilla.jobs.calls import TALK
from cuadrilla.jobs.places import Doing, Left
from cuadrilla.messages import Message
from cuadrilla.rundir import (
    FolderLock,
    RunDir,
    make_private,
    private_folder,
    read_regular,
    typed,
    write_atomic,
    write_json,
)
from cuadrilla.runfile import dump, has_begun, leaves, read_run_file
from cuadrilla.train.setup import SPARE_DISK_BYTES
from cuadrilla.tune.assign import AtJob, assign
from cuadrilla.tune.folder import JobPart, SearchFolder, check_same, read_identity, write_search
from cuadrilla.tune.function import SCORE, Function, code_sha256, read_code, read_function
from cuadrilla.tune.results import read_found
from cuadrilla.tune.sampler import make_sampler
from cuadrilla.tune.search import Job, Search, TrialResult
from cuadrilla.tune.space import Space
from cuadrilla.tune.study import Study
from cuadrilla.tune.trial import (
    Base,
    data_hash,
    discard_weights,
    kept_step,
    length_of,
    make_trial,
    num_parameters,
    rung_lengths,
    settings_of,
)

LOOK_SECONDS = 0.25
STOP_SECONDS = 120.0
"""A pass of a large model takes its time, and its checkpoint too."""
SEVERAL = ", "
"""Between the places of a job that went on elsewhere."""
HOPELESS = 5
"""Failed trials in a row, before the first that succeeds: then it is not the settings."""
NOT_RELEVANT = ("engine.", "alarm.", "checkpoint.", "sample.", "train.device", "train.threads")
UNSEARCHED = ("trials", "tokens", "hours", "constraints")
"""Keys of the section that may change while a search goes on."""


class Hears(Protocol):
    """Who hears of a search: a command, or nobody."""

    def opened(self, searching: "Searching") -> None: ...

    def began(self, job: Job, place: str) -> None: ...

    def ended(self, job: Job, found: TrialResult) -> None: ...

    def looked(self) -> None:
        """A few times a second."""


@dataclass(kw_only=True)
class Searching:
    """A search under way."""

    base: Base
    folder: SearchFolder
    search: Search
    places: Doing[Job]
    hears: Hears
    study: Study
    rung_steps: list[int]
    stop: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)
    spent_before: float = 0.0
    parts: dict[tuple[int, int], list[JobPart]] = field(default_factory=dict)
    """What was done of jobs that somebody else has to go on with."""
    _failures: int = 0
    """In a row, before the first success; -1 from there on."""
    _begun: dict[str, float] = field(default_factory=dict)
    """When each place began its job."""
    _tidied: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Of which runs weights are gone: all of them, or not."""

    def __post_init__(self) -> None:
        if any(found.score is not None for found in self.search.results.values()):
            self._failures = -1

    @property
    def seconds(self) -> float:
        """Over all starts."""
        return self.spent_before + time.monotonic() - self.began

    @property
    def may_begin(self) -> bool:
        hours = self.base.section.hours
        return not hours or self.seconds < 3600 * hours

    def seconds_left(self) -> float | None:
        """If all trials are tried, by what finished ones took; None before there is one."""
        search = self.search
        done = [(search.jobs[key], found) for key, found in search.results.items() if found.seconds and found.tokens]
        if not done:
            return None
        rate = sum(found.seconds for _, found in done) / sum(found.tokens for _, found in done)
        limit = self.base.section.tokens or math.inf
        tokens = min(search.whole_tokens, limit) - sum(search.job_tokens(job) for job, _ in done)
        return max(rate * tokens, 0.0) / max(len(self.places.places), 1)

    def table(self) -> list[dict[str, Any]]:
        """A row for each finished run, the best first; of a trial that went on, its longest."""
        search = self.search
        rows = [{"run": job.name, "score": search.results[job.key].score, **job.values} for job in search.ranked()]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        return [{key: row.get(key) for key in keys} for row in rows]

    def run(self) -> None:
        """To the end, or until `stop` is set: then what is under way is saved. Raises CuadrillaError."""
        while not self.stop.is_set():
            self._begin_all()
            if self._is_done():
                self.study.close()
                return
            self.stop.wait(LOOK_SECONDS)
            self._take(self.places.look())
            self.hears.looked()
        self._stop_all()

    def _is_done(self) -> bool:
        """Nothing is under way, and a place that is free has found nothing to do. Without any place, somebody may still
        come."""
        if self.places.busy or not self.search.is_idle:
            return False
        return bool(self.places.free) or self.search.is_over or not self.may_begin

    def _begin_all(self) -> None:
        """Each free place gets a job, if there are enough; again, where one was finished before it began."""
        again = True
        while again and (free := self.places.free):
            jobs: list[Job] = []
            while len(jobs) < len(free) and (job := self.search.next_job(more=self.may_begin)) is not None:
                jobs.append(job)
            at = self._assigned(jobs, free)
            for number, job in enumerate(jobs):
                if number not in at:
                    self.search.give_back(job)
            again = not all([self._hand_out(job, at[number]) for number, job in enumerate(jobs) if number in at])

    def _assigned(self, jobs: list[Job], free: list[str]) -> dict[int, str]:
        speeds, now = place_speeds(self.search), time.monotonic()
        busy = [
            AtJob(place=place, seconds_left=max(0.0, began + self.search.job_tokens(job) / speeds[place] - now))
            for place, job in self.places.busy.items()
            if place in speeds and (began := self._begun.get(place)) is not None
        ]
        tokens = [self.search.job_tokens(job) for job in jobs]
        more = self.search.num_to_come if self.may_begin else 0
        return assign(tokens, free=free, busy=busy, speeds=speeds, more=more)

    def _hand_out(self, job: Job, place: str) -> bool:
        self.folder.began(job, place=place)
        self.study.began(job)
        self._begun[place] = time.monotonic()
        return self._begin(job, place)

    def _begin(self, job: Job, place: str) -> bool:
        """False if there was nothing to do: it is finished already."""
        below = self.folder.run(Job(trial=job.trial, rung=job.rung - 1, values=job.values)).path if job.rung else None
        try:
            run = make_trial(job, self.base, folder=self.folder.path / job.name, below=below)
            missed = self._too_large(run)
        except (ConfigError, TaskError, DataError) as error:  # a combination that the task does not take
            missed = error.message
        if missed:
            self._finish(job, TrialResult(score=None, reason=missed, place=place))
            return False
        self.places.start(job, run, name=place)
        self.hears.began(job, place)
        return True

    def _too_large(self, run: RunDir) -> Message | None:
        """What a constraint says before anything is trained."""
        limit = self.base.section.constraints.get("parameters")
        if limit is None:
            return None
        number = num_parameters(settings_of(run), run.path)
        if limit.at_most is not None and number > limit.at_most:
            return Message("{number:,} parameters, at most {most:,.0f}", number=number, most=limit.at_most)
        if limit.at_least is not None and number < limit.at_least:
            return Message("{number:,} parameters, at least {least:,.0f}", number=number, least=limit.at_least)
        return None

    def _take(self, left: list[Left[Job]]) -> None:
        for each in map(self._with_parts, left):
            if each.complete:
                self._finish(each.job, self._read(each))
            elif each.reason:
                if each.code == ResourceError.exit_code:
                    self._require_room()
                self._finish(
                    each.job, TrialResult(score=None, reason=each.reason, seconds=each.seconds, place=each.place)
                )
            else:
                self.search.give_back(each.job)

    def _with_parts(self, left: Left[Job]) -> Left[Job]:
        """With all that the job took, wherever; what it took so far is kept for whoever goes on."""
        parts = self.parts.setdefault(left.job.key, [])
        if left.complete or left.reason:
            seconds = left.seconds + sum(part.seconds for part in parts)
            place = SEVERAL.join(dict.fromkeys([*(part.place for part in parts), left.place]))
            return replace(left, seconds=seconds, place=place)
        self.folder.left(left.job, place=left.place, seconds=left.seconds)
        parts.append(JobPart(place=left.place, seconds=left.seconds))
        return left

    def _require_room(self) -> None:
        """A full disk fails whatever is tried on it: no combination is to blame. Raises ResourceError."""
        free = shutil.disk_usage(self.folder.path).free
        if free < SPARE_DISK_BYTES:
            raise ResourceError(
                "{folder} has {free:.2f} GiB free; a training needs 1 GiB to spare",
                folder=self.folder.path,
                free=free / 2**30,
                hint="free some space, then type the same command: what has finished is kept",
            )

    def _read(self, left: Left[Job]) -> TrialResult:
        run, job = self.folder.run(left.job), left.job
        below = self.folder.run(Job(trial=job.trial, rung=job.rung - 1, values=job.values)) if job.rung else None
        config = settings_of(run)
        return read_found(
            run,
            self.base.section,
            from_step=kept_step(below) if below else 0,
            seconds=left.seconds,
            place=left.place,
            num_parameters=num_parameters(config, run.path),
        )

    def _finish(self, job: Job, found: TrialResult) -> None:
        self.search.finish(job, found)
        self.folder.ended(job, found)
        self.study.ended(job, found)
        self.hears.ended(job, found)
        if found.score is not None:
            self._failures = -1
        elif self._failures >= 0:
            self._failures += 1
        if self._failures >= HOPELESS:
            raise TaskError(
                "the first {number} trials have failed, the last one: {reason}",
                number=self._failures,
                reason=found.reason,
                hint=self._where_to_look(self.folder.run(job)),
            )
        self._tidy()
        self._write_best()

    def _where_to_look(self, run: RunDir) -> Message:
        return Message("cuadrilla train {run} shows it", run=typed(run.path))

    def _tidy(self) -> None:
        """Weights stay where they are needed: of the best, of those that may go on, of those that are under way."""
        best = self.search.best
        for key in self.search.results:
            job = self.search.jobs[key]
            every = not self.search.may_go_on(job)
            if job != best and self._tidied.get(key) != every:
                discard_weights(self.folder.run(job), all_of_them=every)
                self._tidied[key] = every

    def _write_best(self) -> None:
        """As a run folder of its own, ready to train; not over one that somebody has begun to train."""
        if self.search.best is not None and not has_begun(run := self.best_run):
            make_private(run.path)
            write_atomic(run.run_file, self._best_text, private=True)

    @property
    def best_run(self) -> RunDir:
        """Where the best settings are: beside a run with others that somebody has trained since they were the best."""
        assert self.search.best is not None
        run = self.folder.best
        if not has_begun(run) or run.run_file.read_text(encoding="utf-8") == self._best_text:
            return run
        return RunDir(self.folder.path / f"{run.path.name}-{self.search.best.name}")

    @property
    def _best_text(self) -> str:
        assert self.search.best is not None
        return self.base.run_file(self.search.best.values, folder=self.folder.best.path)

    def _stop_all(self) -> None:
        self.places.stop()
        deadline = time.monotonic() + STOP_SECONDS
        while self.places.busy and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            self._take(self.places.look())
            self.hears.looked()


def place_speeds(search: Search) -> dict[str, float]:
    """Of places that have finished jobs, each by itself: tokens per second, as planned for the rung."""
    done: dict[str, list[float]] = {}
    for key, found in search.results.items():
        if found.place and SEVERAL not in found.place and found.seconds and found.score is not None:
            done.setdefault(found.place, []).append(search.job_tokens(search.jobs[key]) / found.seconds)
    return {place: statistics.median(rates) for place, rates in done.items()}


@dataclass(kw_only=True)
class FunctionSearching(Searching):
    """Its trials are calls of a function. `seed`: given to it, if it takes one."""

    function: Function
    seed: int

    def seconds_left(self) -> float | None:
        search = self.search
        done = [search.job_tokens(search.jobs[key]) for key, found in search.results.items() if found.seconds]
        if not done:
            return None
        rate = sum(found.seconds for found in search.results.values()) / sum(done)
        return max(rate * (search.whole_tokens - sum(done)), 0.0) / max(len(self.places.places), 1)

    def _begin(self, job: Job, place: str) -> bool:
        section, run = self.base.section, self.folder.run(job)
        budget = section.factor ** -(section.rungs - 1.0 - job.rung)
        if code_sha256(read_code(self.function.path)) != self.function.sha256:
            hint = "put it back and type the same command again; finished trials are kept"
            raise ConfigError("{path} has changed while the search goes on", path=self.function.path, hint=hint)
        make_private(run.path)
        write_json(run.path / REQUEST, self.function.request(job.values, seed=self.seed, budget=budget), private=True)
        self.places.start(job, run, name=place)
        self.hears.began(job, place)
        return True

    def _with_parts(self, left: Left[Job]) -> Left[Job]:
        """Nothing is kept of a call that has not ended."""
        if not left.complete and not left.reason:
            self.folder.left(left.job, place=left.place, seconds=left.seconds)
        return left

    def _read(self, left: Left[Job]) -> TrialResult:
        name = self.base.section.metric or SCORE
        if name not in left.figures:
            known = ", ".join(left.figures)
            reason = Message("the function gives no {name}; there are {known}", name=name, known=known)
            return TrialResult(score=None, seconds=left.seconds, place=left.place, reason=reason)
        figures = dict(left.figures)
        return TrialResult(score=figures[name], figures=figures, seconds=left.seconds, place=left.place)

    def _where_to_look(self, run: RunDir) -> Message:
        return Message("{log} has what it printed", log=run.logs / TALK)

    def _tidy(self) -> None:
        pass

    def _write_best(self) -> None:
        """What to give to the function."""
        if best := self.search.best:
            found = {"trial": best.name, "score": self.search.results[best.key].score, "values": best.values}
            write_json(self.folder.best_values, found, private=True)


@contextmanager
def open_search(run_file: Path, *, sets: Sequence[str], places: Doing[Job], hears: Hears) -> Iterator[Searching]:
    """The search of a run file, in `tune/` beside it, under its lock; one that has begun goes on.

    Raises ConfigError for a space that cannot be searched, or where it began as another one; EnvironmentProblem.
    """
    text = read_regular(run_file).decode("utf-8-sig")
    resolved = read_run_file(run_file, sets=sets, to_train=False)
    section, folder = resolved.config.tune, SearchFolder(run_file.parent.resolve() / "tune")
    base = Base(text=text, folder=run_file.parent.resolve(), sets=tuple(sets), section=section)
    function = read_function(section, folder=base.folder) if section.function else None
    space = Space(section, resolved.config)
    space.try_extremes(text, sets)
    suggest, num_trials = make_sampler(section, space)
    make_private(folder.path)
    with FolderLock(folder.lock, purpose=Message("the search")):
        plan = _plan_of_calls(function, section) if function else _plan_of_runs(base, folder)
        wanted = _identity(resolved.config) | plan.identity
        if folder.search.exists():
            check_same(folder, wanted, plan.identity | read_identity(folder))  # older ones say less
        constraints = section.model_dump()["constraints"]
        write_search(folder, wanted, {"num_trials": num_trials, "rung_steps": plan.steps, "constraints": constraints})
        tokens = [each * plan.round_tokens for each in plan.steps]
        search = Search(section, suggest=suggest, num_trials=num_trials, rung_tokens=tokens)
        folder.replay(search)
        spent, parts = folder.spent_seconds(), folder.parts()
        folder.started()
        study = Study(folder, section, search)
        kind = partial(FunctionSearching, function=function, seed=resolved.config.run.seed) if function else Searching
        searching = kind(
            base=base,
            folder=folder,
            search=search,
            places=places,
            hears=hears,
            study=study,
            rung_steps=plan.steps,
            spent_before=spent,
            parts=parts,
        )
        try:
            hears.opened(searching)
            yield searching
        finally:
            places.close()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """`steps`: of a job at each rung. `identity`: what a search must go on with beside its settings."""

    steps: list[int]
    round_tokens: int
    identity: dict[str, str]


def _plan_of_calls(function: Function, section: TuneSection) -> _Plan:
    """A call has no steps: the shortest one counts as one."""
    steps = [section.factor**rung for rung in range(section.rungs)]
    return _Plan(steps=steps, round_tokens=1, identity={"tune.function.sha256": function.sha256})


def _plan_of_runs(base: Base, folder: SearchFolder) -> _Plan:
    """Raises ConfigError, DataError, TaskError."""
    with private_folder(where=folder.path) as scratch:
        config = base.settled({}, folder=scratch)
        whole = length_of(config, scratch)
        lengths = rung_lengths(config, base.section, num_steps=whole.num_versions)
        steps = [each.steps for each in lengths]
        identity = {"data": data_hash(config, scratch), **_code_of_task(config, scratch)}
    return _Plan(steps=steps, round_tokens=whole.round_tokens, identity=identity)


def _code_of_task(config: Config, folder: Path) -> dict[str, str]:
    """Of a task of the user's own, with the files that it imports. Raises TaskError."""
    if not isinstance(config.task, FileTaskSection):
        return {}
    path = (folder / config.task.path.rpartition(":")[0]).resolve()
    return {"task.path.sha256": code_sha256(read_code(path))}


def _identity(config: Config) -> dict[str, Any]:
    """What a search must go on with: all that decides its results, but for how long it goes on."""
    values = leaves(dump(config))
    free = (*NOT_RELEVANT, *(f"tune.{key}" for key in UNSEARCHED))
    return {key: value for key, value in values.items() if not key.startswith(free)}
