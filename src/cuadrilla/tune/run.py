"""One search, from its run file to its best trial: asks `Search` what is next, and has places do it.

Whatever ends this process, the same command goes on: finished trials are in the study, others in checkpoints.
"""

import math
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cuadrilla.config import Config, FileTaskSection
from cuadrilla.crew.bundle import code_hash
from cuadrilla.errors import ConfigError, DataError, ResourceError, TaskError
from cuadrilla.jobs.executor import Ended, Executor
from cuadrilla.messages import Message
from cuadrilla.rundir import (
    FolderLock,
    RunDir,
    make_private,
    private_folder,
    read_regular,
    typed,
    write_atomic,
)
from cuadrilla.runfile import dump, has_begun, leaves, read_run_file
from cuadrilla.train.setup import SPARE_DISK_BYTES
from cuadrilla.tune.assign import AtJob, assign
from cuadrilla.tune.folder import SearchFolder, check_same, read_identity, write_search
from cuadrilla.tune.results import read_found
from cuadrilla.tune.search import Job, JobPart, Search, TrialResult, open_storage
from cuadrilla.tune.space import Space
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
from cuadrilla.user_file import UsersCode, files_of

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0
"""A pass of a large model takes its time, and its checkpoint too."""
SEVERAL = ", "
"""Between the places of a job that went on elsewhere."""
HOPELESS = 5
"""Trials that have failed where none has succeeded: then it is not the settings."""
NOT_RELEVANT = ("engine.", "alarm.", "checkpoint.", "sample.", "train.device", "train.threads")
UNSEARCHED = ("trials", "tokens", "hours", "constraints")
"""Keys of the section that may change while a search goes on."""


@dataclass(kw_only=True)
class Searching:
    """A search under way."""

    base: Base
    folder: SearchFolder
    search: Search
    executor: Executor
    tell: Callable[[Job, TrialResult], None] = lambda _job, _found: None
    """Called for each job that has ended."""
    rung_steps: list[int]
    stop: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)
    spent_before: float = 0.0
    _begun: dict[str, float] = field(default_factory=dict)
    """When each place began its job."""
    _tidied: dict[tuple[int, int], bool] = field(default_factory=dict)
    """The runs whose weights are gone: all of them, or all but one checkpoint."""

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
        return max(rate * tokens, 0.0) / max(len(self.executor.places), 1)

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
                return
            self.stop.wait(POLL_SECONDS)
            self._take(self.executor.poll())
        self._stop_all()

    def _is_done(self) -> bool:
        """Nothing is under way, and a place that is free has found nothing to do. Without any place, somebody may still
        come."""
        if self.executor.busy or not self.search.is_idle:
            return False
        return bool(self.executor.free) or self.search.is_over or not self.may_begin

    def _begin_all(self) -> None:
        """Each free place gets a job, if there are enough; again, where one was finished before it began."""
        again = True
        while again and (free := self.executor.free):
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
        ends = {
            place: self._begun[place] + self.search.job_tokens(self.search.named[name]) / speeds[place]
            for place, name in self.executor.busy.items()
            if place in speeds and place in self._begun
        }
        busy = [AtJob(place=place, seconds_left=max(0.0, end - now)) for place, end in ends.items()]
        tokens = [self.search.job_tokens(job) for job in jobs]
        more = self.search.num_to_come if self.may_begin else 0
        return assign(tokens, free=free, busy=busy, speeds=speeds, more=more)

    def _hand_out(self, job: Job, place: str) -> bool:
        self.folder.began(job, place=place)
        self.search.note_spent(self.seconds)
        self._begun[place] = time.monotonic()
        return self._begin(job, place)

    def _begin(self, job: Job, place: str) -> bool:
        """False if there was nothing to do: it is finished already."""
        try:
            with UsersCode():
                run = make_trial(job, self.base, folder=self.folder.path / job.name, below=self._below(job))
                missed = self._too_large(run)
        except (ConfigError, TaskError, DataError) as error:  # a combination that the task does not take
            missed = error.message
        if missed:
            self._finish(job, TrialResult(score=None, reason=missed, place=place))
            return False
        self.executor.start(job.name, run, place=place)
        return True

    def _too_large(self, run: RunDir) -> Message | None:
        """The reason of a constraint that is missed before anything is trained."""
        limit = self.base.section.constraints.get("parameters")
        if limit is None:
            return None
        number = num_parameters(settings_of(run), run.path)
        if limit.at_most is not None and number > limit.at_most:
            return Message("{number:,} parameters, at most {most:,.0f}", number=number, most=limit.at_most)
        if limit.at_least is not None and number < limit.at_least:
            return Message("{number:,} parameters, at least {least:,.0f}", number=number, least=limit.at_least)
        return None

    def _take(self, ended: list[Ended]) -> None:
        for each in ended:
            job = self.search.named[each.job]
            parts = self.search.parts[job.key]
            seconds = each.seconds + sum(part.seconds for part in parts)
            place = SEVERAL.join(dict.fromkeys([*(part.place for part in parts), each.place]))
            if each.complete:
                self._finish(job, self._read(job, seconds=seconds, place=place))
            elif each.reason:
                if each.code == ResourceError.exit_code:
                    self._require_room()
                self._finish(job, TrialResult(score=None, reason=each.reason, seconds=seconds, place=place))
            else:
                part = JobPart(place=each.place, seconds=each.seconds)
                self.search.give_back(job, part)
                self.folder.left(job, part)

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

    def _read(self, job: Job, *, seconds: float, place: str) -> TrialResult:
        run, below = self.folder.run(job), self._below(job)
        return read_found(
            run,
            self.base.section,
            from_step=kept_step(below) if below else 0,
            seconds=seconds,
            place=place,
            num_parameters=num_parameters(settings_of(run), run.path),
        )

    def _below(self, job: Job) -> RunDir | None:
        """The shorter run of the same trial."""
        return self.folder.run(replace(job, rung=job.rung - 1)) if job.rung else None

    def _finish(self, job: Job, found: TrialResult) -> None:
        self.search.finish(job, found)
        self.search.note_spent(self.seconds)
        self.folder.ended(job, found)
        self.tell(job, found)
        results = self.search.results.values()
        if len(results) >= HOPELESS and all(each.score is None for each in results):
            raise TaskError(
                "the first {number} trials have failed, the last one: {reason}",
                number=len(results),
                reason=found.reason,
                hint="cuadrilla train {run} shows it",
                run=typed(self.folder.run(job).path),
            )
        self._tidy()
        self._write_best()

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
        """The run folder of the best settings; beside `best` where other settings have been trained in it."""
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
        for job in self.executor.busy.values():
            self.executor.preempt(job)
        deadline = time.monotonic() + STOP_SECONDS
        while self.executor.busy and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._take(self.executor.poll())
        self.search.note_spent(self.seconds)


def place_speeds(search: Search) -> dict[str, float]:
    """Tokens per second, as planned for the rung, of places that have finished jobs alone."""
    done: dict[str, list[float]] = {}
    for key, found in search.results.items():
        if found.place and SEVERAL not in found.place and found.seconds and found.score is not None:
            done.setdefault(found.place, []).append(search.job_tokens(search.jobs[key]) / found.seconds)
    return {place: statistics.median(rates) for place, rates in done.items()}


@contextmanager
def open_search(run_file: Path, *, sets: Sequence[str], executor: Executor) -> Iterator[Searching]:
    """The search of a run file, in `tune/` beside it, under its lock; one that has begun goes on.

    Raises ConfigError for a space that cannot be searched, or where it began as another one; EnvironmentProblem.
    """
    text = read_regular(run_file).decode("utf-8-sig")
    resolved = read_run_file(run_file, sets=sets, as_new=True)
    section, folder = resolved.config.tune, SearchFolder(run_file.parent.resolve() / "tune")
    base = Base(text=text, folder=run_file.parent.resolve(), sets=tuple(sets), section=section)
    space = Space(section, resolved.config)
    space.try_extremes(text, sets)
    make_private(folder.path)
    with FolderLock(folder.lock, purpose=Message("the search")):
        plan = _plan(base, folder)
        wanted = _identity(resolved.config) | plan.identity
        if folder.search.exists():
            check_same(folder, wanted, read_identity(folder))
        write_search(folder, wanted, rung_steps=plan.steps)
        tokens = [each * plan.step_tokens for each in plan.steps]
        search = Search(section, space=space, storage=open_storage(folder.study), rung_tokens=tokens)
        folder.started(search)
        searching = Searching(
            base=base,
            folder=folder,
            search=search,
            executor=executor,
            rung_steps=plan.steps,
            spent_before=search.spent_seconds,
        )
        try:
            yield searching
        finally:
            executor.close()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """`steps`: of a job at each rung. `identity`: what a search must go on with beside its settings."""

    steps: list[int]
    step_tokens: int
    identity: dict[str, str]


def _plan(base: Base, folder: SearchFolder) -> _Plan:
    """Raises ConfigError, DataError, TaskError."""
    with private_folder(where=folder.path) as scratch:
        config = base.settled({}, folder=scratch)
        whole = length_of(config, scratch)
        lengths = rung_lengths(config, base.section, num_steps=whole.num_steps)
        steps = [each.steps for each in lengths]
        identity = {"data": data_hash(config, scratch), **_code_of_task(config, scratch)}
    return _Plan(steps=steps, step_tokens=whole.step_tokens, identity=identity)


def _code_of_task(config: Config, folder: Path) -> dict[str, str]:
    """SHA-256 of a task of the user's own, which has been loaded, with the files that it imports."""
    if not isinstance(config.task, FileTaskSection):
        return {}
    path = (folder / config.task.file).resolve()
    return {"task.path.sha256": code_hash(files_of(path))}


def _identity(config: Config) -> dict[str, Any]:
    """The settings that a search must go on with: all that decide its results, but not its length."""
    values = leaves(dump(config))
    free = (*NOT_RELEVANT, *(f"tune.{key}" for key in UNSEARCHED))
    return {key: value for key, value in values.items() if not key.startswith(free)}
