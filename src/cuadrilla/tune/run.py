"""One search, from its run file to its best trial: a `JobSource` of the trials that `Search` decides on.

Whatever ends this process, the same command resumes: finished trials are in the study, others in checkpoints.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cuadrilla.jobs.executor import Ended, Executor, hand_out
from cuadrilla.messages import Message
from cuadrilla.rundir import (
    FolderLock,
    RunDir,
    last_rows,
    make_private,
    typed,
    write_json,
)
from cuadrilla.runfile import read_run_file, to_toml
from cuadrilla.tune.folder import TUNE, SearchFolder, discard_weights, read_scores
from cuadrilla.tune.search import SECONDS, Search, job_of, open_storage, score_of, storing
from cuadrilla.tune.space import Space
from cuadrilla.user_file import UsersCode

BEHIND = Message("worse than the median of the others at the same part of their runs")


@dataclass(kw_only=True)
class Searching:
    """A search in progress, as the `JobSource` of its executors."""

    folder: SearchFolder
    search: Search
    executors: Sequence[Executor]
    num_steps: int
    """Number of steps of each run."""
    tell: Callable[[Ended, float | None], None] = lambda _ended, _score: None
    """Called with the score of each run that has ended."""
    stop: threading.Event = field(default_factory=threading.Event)
    _looked: dict[str, int] = field(default_factory=dict)
    """Size of each job's metrics.jsonl when its scores were last compared."""
    _behind: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Search to the end, or until `stop` is set; then running trials are saved. Raises CuadrillaError."""
        hand_out(self, self.executors, stop=self.stop)

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial that has ended, the best first."""
        rows = [{"run": job_of(trial), "score": score_of(trial), **trial.params} for trial in self.search.ranked()]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        return [{key: row.get(key) for key in keys} for row in rows]

    def seconds_left(self) -> float | None:
        """Estimate from the time that ended trials took; None before the first has ended."""
        seconds: list[float] = [trial.user_attrs.get(SECONDS, 0.0) for trial in self.search.ended]
        if not any(seconds):
            return None
        num_places = sum(len(executor.places) for executor in self.executors)
        return (self.search.num_trials - len(seconds)) * sum(seconds) / len(seconds) / max(num_places, 1)

    # -- JobSource -----------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.search.has_tried_all

    def next_job(self, _place: str, _device: str) -> str | None:
        return self.search.next_job()

    def run_of(self, job: str) -> RunDir:
        """Make the trial's run. Raises CuadrillaError for a combination that the task does not take."""
        with UsersCode():
            return self.folder.make_trial(job, dict(self.search.trial(job).params))

    def begun(self, _job: str, _place: str) -> None: ...

    def ended(self, ended: Ended) -> None:
        if ended.complete:
            scores = read_scores(self.folder.run(ended.job), self.search.section.metric)
            if not scores:
                ended = replace(ended, reason=self._without_score(ended.job))
            self._finish(ended, (max if self.search.section.maximize else min)(scores.values(), default=None))
        elif ended.reason or ended.job in self._behind:
            self._finish(replace(ended, reason=ended.reason or BEHIND), None)
        else:
            self.search.give_back(ended.job)

    def unwanted(self) -> list[str]:
        """Running trials that are behind the others, if `tune.prune` is set."""
        if self.search.section.prune:
            self._behind |= {
                job for executor in self.executors for job in executor.busy.values() if self._is_behind(job)
            }
        return sorted(self._behind)

    def _is_behind(self, job: str) -> bool:
        run = self.folder.run(job)
        size = run.metrics.stat().st_size if run.metrics.exists() else 0
        if size == self._looked.get(job, 0):
            return False
        self._looked[job] = size
        scores = read_scores(run, self.search.section.metric)
        return self.search.is_behind(job, {100 * step // self.num_steps: score for step, score in scores.items()})

    def _without_score(self, job: str) -> Message:
        known = ", ".join(sorted({key for row in last_rows(self.folder.run(job).metrics) for key in row}))
        metric = self.search.section.metric or "val_loss"
        return Message("no step has {name}; there are {known}", name=metric, known=known)

    def _finish(self, ended: Ended, score: float | None) -> None:
        self.search.finish(ended, score=score, pruned=ended.job in self._behind)
        self._behind.discard(ended.job)
        self.tell(ended, score)
        best = self.search.best
        for trial in self.search.ended:
            if best is None or trial.number != best.number:
                discard_weights(self.folder.run(job_of(trial)))
        if best is not None:
            self.folder.keep_best(job_of(best))


@contextmanager
def open_search(run_file: Path, *, sets: Sequence[str], executors: Sequence[Executor]) -> Iterator[Searching]:
    """Open the search of a run file, in `tune/` beside it, under its lock. A search that has begun goes on.

    Raises ConfigError for a space that cannot be searched, or a search that began with other settings, and
    EnvironmentProblem.
    """
    text = run_file.read_text(encoding="utf-8-sig")
    config = read_run_file(run_file, sets=sets).config
    folder = SearchFolder(run_file.parent.resolve() / TUNE, text=text, sets=tuple(sets))
    space = Space(config.tune, text=text, sets=sets)
    make_private(folder.path)
    with FolderLock(folder.lock, purpose=Message("the search")), storing():
        _, steps = folder.settled({})
        search = Search(config.tune, space=space, storage=open_storage(folder.study))
        same = config.model_copy(update={"tune": config.tune.model_copy(update={"trials": 0})})
        search.require_same(to_toml(same), folder=typed(folder.path))
        status = RunDir(folder.path).status
        write_json(status, {"state": "running"}, private=True)
        try:
            yield Searching(folder=folder, search=search, executors=executors, num_steps=steps)
        finally:
            for executor in executors:
                executor.close()
            write_json(status, {"state": "complete" if search.has_tried_all else "stopped"}, private=True)
