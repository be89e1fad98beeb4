"""One search, from its run file to its best trial: asks `Search` what is next, and has places do it.

Whatever ends this process, the same command goes on: finished trials are in the study, others in checkpoints.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cuadrilla.config import Config
from cuadrilla.errors import ConfigError, DataError, TaskError
from cuadrilla.jobs.executor import Ended, Executor
from cuadrilla.messages import Message
from cuadrilla.rundir import (
    FolderLock,
    RunDir,
    make_private,
    typed,
    write_atomic,
    write_json,
)
from cuadrilla.runfile import dump, has_begun, leaves, read_run_file
from cuadrilla.tune.folder import SearchFolder
from cuadrilla.tune.search import Job, Search, TrialResult, open_storage
from cuadrilla.tune.space import Space
from cuadrilla.tune.trial import (
    Base,
    discard_weights,
    kept_step,
    length_of,
    make_trial,
    read_result,
    rung_lengths,
)
from cuadrilla.user_file import UsersCode

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0
"""A pass of a large model takes its time, and its checkpoint too."""
HOPELESS = 5
"""Trials that have failed where none has succeeded: then it is not the settings."""
SPARE_DISK_BYTES = 2**30
NOT_RELEVANT = ("engine.", "alarm.", "checkpoint.", "sample.", "train.device", "train.threads")
UNSEARCHED = ("tune.trials", "tune.hours")
"""May change while a search goes on."""


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

    @property
    def may_begin(self) -> bool:
        hours = self.base.section.hours
        return not hours or time.monotonic() - self.began < 3600 * hours

    @property
    def steps_left(self) -> int:
        """Of runs that have not ended, if all trials are tried."""
        whole = sum(self.search.num_jobs(rung) * steps for rung, steps in enumerate(self.rung_steps))
        return whole - sum(self.rung_steps[rung] for _, rung in self.search.results)

    def seconds_left(self) -> float | None:
        """By what finished runs took; None before there is one."""
        found = self.search.results
        steps = sum(self.rung_steps[rung] for (_, rung), each in found.items() if each.seconds)
        if not steps:
            return None
        seconds = sum(each.seconds for each in found.values())
        return max(self.steps_left * seconds / steps, 0.0) / max(len(self.executor.places), 1)

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
        """Each free place gets a job, the fastest first."""
        speeds = self._speeds()
        for place in sorted(self.executor.free, key=lambda place: -speeds.get(place, float("inf"))):
            while (job := self.search.next_job(more=self.may_begin)) is not None:
                if self._is_too_slow(place, job, speeds):
                    self.search.give_back(job)
                    break
                if self._begin(job, place):
                    break

    def _speeds(self) -> dict[str, float]:
        """Steps per second of places that have finished jobs."""
        done: dict[str, list[float]] = {}
        for (_, rung), found in self.search.results.items():
            if found.seconds and found.score is not None:
                done.setdefault(found.place, []).append(self.rung_steps[rung] / found.seconds)
        return {place: statistics.median(rates) for place, rates in done.items()}

    def _is_too_slow(self, place: str, job: Job, speeds: dict[str, float]) -> bool:
        """Whether the others would have done all that is left before this place had done this job."""
        others = sum(speeds.get(other, 0.0) for other in {*self.executor.busy, *self.executor.free} - {place})
        if place not in speeds or not others:
            return False
        return self.rung_steps[job.rung] / speeds[place] > self.steps_left / others

    def _begin(self, job: Job, place: str) -> bool:
        """False if there was nothing to do: it is finished already."""
        try:
            with UsersCode():
                run = make_trial(job, self.base, folder=self.folder.path / job.name, below=self._below(job))
        except (ConfigError, TaskError, DataError) as error:  # a combination that the task does not take
            self._finish(job, TrialResult(score=None, reason=error.message, place=place))
            return False
        self.executor.start(job.name, run, place=place)
        self._write_jobs()
        return True

    def _take(self, ended: list[Ended]) -> None:
        named = {job.name: job for job in self.search.jobs.values()}
        for each in ended:
            job, place, seconds = named[each.job], each.place, each.seconds
            if each.complete:
                below, run = self._below(job), self.folder.run(job)
                from_step = kept_step(below) if below else 0
                self._finish(
                    job, read_result(run, self.base.section, from_step=from_step, seconds=seconds, place=place)
                )
            elif each.reason:
                self._finish(job, TrialResult(score=None, reason=each.reason, seconds=seconds, place=place))
            else:
                self.search.give_back(job)
                self._write_jobs()

    def _below(self, job: Job) -> RunDir | None:
        """The shorter run of the same trial."""
        return self.folder.run(replace(job, rung=job.rung - 1)) if job.rung else None

    def _write_jobs(self) -> None:
        at = {job: place for place, job in self.executor.busy.items()}
        self.folder.write_jobs(self.search, at=at, steps=self.rung_steps)

    def _finish(self, job: Job, found: TrialResult) -> None:
        self.search.finish(job, found)
        self._write_jobs()
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
        """Weights stay where they are needed: of the best, and of those that may go on."""
        for key in self.search.results:
            job = self.search.jobs[key]
            if job != self.search.best:
                discard_weights(self.folder.run(job), all_of_them=not self.search.may_go_on(job))

    def _write_best(self) -> None:
        """As a run folder of its own, ready to train; not over one that somebody has begun to train."""
        best, run = self.search.best, self.folder.best
        if best is not None and not has_begun(run):
            make_private(run.path)
            write_atomic(run.run_file, self.base.run_file(best.values, folder=run.path), private=True)

    def _stop_all(self) -> None:
        for job in self.executor.busy.values():
            self.executor.preempt(job)
        deadline = time.monotonic() + STOP_SECONDS
        while self.executor.busy and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._take(self.executor.poll())


@contextmanager
def open_search(run_file: Path, *, sets: Sequence[str], executor: Executor) -> Iterator[Searching]:
    """The search of a run file, in `tune/` beside it, under its lock; one that has begun goes on.

    Raises ConfigError for a space that cannot be searched, or where it began as another one; EnvironmentProblem.
    """
    text = run_file.read_text(encoding="utf-8-sig")
    config = read_run_file(run_file, sets=sets).config
    section, folder = config.tune, SearchFolder(run_file.parent.resolve() / "tune")
    base = Base(text=text, folder=run_file.parent.resolve(), sets=tuple(sets), section=section)
    space = Space(section, text=text, sets=sets)
    make_private(folder.path)
    with FolderLock(folder.lock, purpose=Message("the search")):
        with TemporaryDirectory(dir=folder.path) as name:
            scratch = Path(name)
            settled = base.settled({}, folder=scratch)
            lengths = rung_lengths(settled, section, num_steps=length_of(settled, scratch).num_steps)
        steps = [each.steps for each in lengths]
        search = Search(section, space=space, storage=open_storage(folder.study))
        search.require_same(_settings(config), folder=typed(folder.path))
        folder.write_jobs(search, at={}, steps=steps)
        try:
            yield Searching(base=base, folder=folder, search=search, executor=executor, rung_steps=steps)
        finally:
            executor.close()
            state = "complete" if search.is_over else "stopped"
            write_json(RunDir(folder.path).status, {"state": state}, private=True)


def _settings(config: Config) -> dict[str, Any]:
    """The settings that a search must go on with: all that decide its results, but not its length."""
    return {
        key: value for key, value in leaves(dump(config)).items() if not key.startswith((*NOT_RELEVANT, *UNSEARCHED))
    }
