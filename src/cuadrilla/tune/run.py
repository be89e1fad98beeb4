"""One search, from its run file to its best trial: the work that `Search` decides on, for an executor's places.

Whatever ends this process, the same command goes on: finished trials are in the study, others in checkpoints.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.config import Config
from cuadrilla.jobs.executor import Ended, Executor, hand_out
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
from cuadrilla.tune.search import RunResult, Search, Trial, open_storage, storing
from cuadrilla.tune.space import Space
from cuadrilla.tune.trial import Base, discard_weights, make_trial, read_result, rung_lengths
from cuadrilla.user_file import UsersCode

NOT_RELEVANT = ("engine.", "alarm.", "checkpoint.", "sample.", "train.device", "train.threads")
UNSEARCHED = ("tune.trials", "tune.hours")
"""May change while a search goes on."""


@dataclass(kw_only=True)
class Searching:
    """A search under way: the work of executors."""

    base: Base
    folder: SearchFolder
    search: Search
    executors: Sequence[Executor]
    rung_steps: list[int]
    tell: Callable[[Trial, RunResult], None] = lambda _trial, _found: None
    """Called for each run that has ended."""
    stop: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """To the end, or until `stop` is set: then what is under way is saved. Raises CuadrillaError."""
        hand_out(self, self.executors, stop=self.stop)

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial of which a run has ended, the best first."""
        rows = [{"run": trial.name, "score": trial.score, **trial.values} for trial in self.search.ranked()]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        return [{key: row.get(key) for key in keys} for row in rows]

    def seconds_left(self) -> float | None:
        """By what trials took; None before one is over."""
        ended = self.search.ended
        seconds = sum(found.seconds for trial in ended for found in trial.results)
        if not seconds:
            return None
        return (self.search.num_trials - len(ended)) * seconds / len(ended) / max(len(self._speeds()), 1)

    # -- JobSource -----------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.search.has_tried_all or (self.search.is_idle and not self._may_begin)

    def next_job(self, place: str, _device: str) -> str | None:
        trial = self.search.next_trial(more=self._may_begin)
        if trial is not None and self._is_too_slow(place, trial):
            self.search.give_back(trial)
            return None
        return None if trial is None else trial.name

    def run_of(self, job: str) -> RunDir:
        """A combination that the task does not take is an error."""
        with UsersCode():
            return make_trial(self._trial(job), self.base, folder=self.folder.path / job)

    def begun(self, _job: str, _place: str) -> None:
        self._write_jobs()

    def ended(self, ended: Ended) -> None:
        trial = self._trial(ended.job)
        told: dict[str, Any] = {"seconds": ended.seconds, "place": ended.place}
        if ended.complete:
            self._finish(trial, read_result(self.folder.run(trial), self.base.section, **told))
        elif ended.reason:
            self._finish(trial, RunResult(score=None, reason=ended.reason, **told))
        else:
            self.search.give_back(trial)
            self._write_jobs()

    def unwanted(self) -> list[str]:
        return []

    @property
    def _may_begin(self) -> bool:
        hours = self.base.section.hours
        return not hours or time.monotonic() - self.began < 3600 * hours

    def _trial(self, job: str) -> Trial:
        return next(trial for trial in self.search.trials if trial.name == job)

    def _is_too_slow(self, place: str, trial: Trial) -> bool:
        """Whether the faster places would have done all that is left before this one had done this."""
        speeds, present = self._speeds(), {name for executor in self.executors for name in executor.places}
        own = speeds.get(place, math.inf)
        faster = sum(speed for other, speed in speeds.items() if other in present and speed > own)
        left = sum(self.rung_steps[each.rung] for each in self.search.trials if not self.search.is_over(each))
        left += (self.search.num_trials - len(self.search.trials)) * self.rung_steps[0]
        return faster > 0 and self.rung_steps[trial.rung] / own > left / faster

    def _speeds(self) -> dict[str, float]:
        """Steps per second of places that have trained something."""
        done: dict[str, list[float]] = {}
        for trial in self.search.trials:
            for steps, found in zip(self.rung_steps, trial.results, strict=False):
                if found.seconds and found.score is not None:
                    done.setdefault(found.place, []).append(steps / found.seconds)
        return {place: statistics.median(rates) for place, rates in done.items()}

    def _write_jobs(self) -> None:
        at = {job: place for executor in self.executors for place, job in executor.busy.items()}
        self.folder.write_jobs(self.search, at=at, steps=self.rung_steps)

    def _finish(self, trial: Trial, found: RunResult) -> None:
        self.search.finish(trial, found)
        self._write_jobs()
        self.tell(trial, found)
        for each in self.search.ended:
            if each is not self.search.best:
                discard_weights(self.folder.run(each))
        self._write_best()

    def _write_best(self) -> None:
        """As a run folder of its own, ready to train; not over one that somebody has begun to train."""
        best, run = self.search.best, self.folder.best
        if best is not None and not has_begun(run):
            make_private(run.path)
            write_atomic(run.run_file, self.base.run_file(best.values, folder=run.path), private=True)


@contextmanager
def open_search(run_file: Path, *, sets: Sequence[str], executors: Sequence[Executor]) -> Iterator[Searching]:
    """The search of a run file, in `tune/` beside it, under its lock; one that has begun goes on.

    Raises ConfigError for a space that cannot be searched, or where it began as another one; EnvironmentProblem.
    """
    text = run_file.read_text(encoding="utf-8-sig")
    config = read_run_file(run_file, sets=sets).config
    section, folder = config.tune, SearchFolder(run_file.parent.resolve() / "tune")
    base = Base(text=text, folder=run_file.parent.resolve(), sets=tuple(sets), section=section)
    space = Space(section, text=text, sets=sets)
    make_private(folder.path)
    with FolderLock(folder.lock, purpose=Message("the search")), storing():
        settled, num_steps = base.settled({})
        steps = [each.steps for each in rung_lengths(settled, section, num_steps=num_steps)]
        search = Search(section, space=space, storage=open_storage(folder.study))
        search.require_same(_settings(config), folder=typed(folder.path))
        folder.write_jobs(search, at={}, steps=steps)
        try:
            yield Searching(base=base, folder=folder, search=search, executors=executors, rung_steps=steps)
        finally:
            for executor in executors:
                executor.close()
            state = "complete" if search.has_tried_all else "stopped"
            write_json(RunDir(folder.path).status, {"state": state}, private=True)


def _settings(config: Config) -> dict[str, Any]:
    """The settings that a search must go on with: all that decide its results, but not its length."""
    return {
        key: value for key, value in leaves(dump(config)).items() if not key.startswith((*NOT_RELEVANT, *UNSEARCHED))
    }
