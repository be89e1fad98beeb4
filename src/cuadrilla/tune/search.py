"""The decisions of a search: which trial is next, which one goes on to a longer run, which was the best. Pure.

A trial is a combination of values; a job is a run of it: one, or with rungs one for each rung that it reaches. Who goes
on is decided by successive halving (ASHA, arXiv 1810.05934) with one difference: promotion number k of a rung looks at
the first `factor` × (k + 1) trials that entered it, all finished, and takes the best that has not gone on. So what is
tried does not depend on who finishes first, and a search that was broken off, or ran on other machines, is the same.

tpe hears of the results of the first rung of all trials up to `ahead` before the one that it is asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cuadrilla.config import ConstraintSection, TuneSection
from cuadrilla.tune.sampler import Known, Suggest
from cuadrilla.tune.space import Values


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of one trial. `rung` 0 is the shortest."""

    trial: int
    rung: int
    values: Values

    @property
    def name(self) -> str:
        return f"t{self.trial:04d}-r{self.rung}"

    @property
    def key(self) -> tuple[int, int]:
        return self.trial, self.rung


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a job gave. `score`: of the metric, as it is in the run; None where there is no usable one, for `reason`.

    `figures`: what constraints look at. `tokens`: trained in this job.
    """

    score: float | None
    figures: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    place: str = ""
    reason: str = ""


@dataclass(kw_only=True)
class _Rung:
    entered: list[int] = field(default_factory=list)
    promotions: int = 0
    """Made, or missed because nobody could go on."""
    promoted: set[int] = field(default_factory=set)


class Search:
    """Told what begins and ends, asked what is next. `rung_tokens`: of a job at each rung, as planned."""

    def __init__(self, section: TuneSection, *, suggest: Suggest, num_trials: int, rung_tokens: Sequence[int]) -> None:
        self.section = section
        self.num_trials = num_trials
        self.results: dict[tuple[int, int], TrialResult] = {}
        self.jobs: dict[tuple[int, int], Job] = {}
        self._suggest = suggest
        self._rung_tokens = list(rung_tokens)
        self._rungs = [_Rung() for _ in rung_tokens]
        self._waiting: list[Job] = []
        """Begun, and not with anybody now."""
        self._running: set[tuple[int, int]] = set()

    # -- what happens --------------------------------------------------------------------------------------------------

    def next_job(self, *, more: bool = True) -> Job | None:
        """What a free place should do; None: nothing now. It counts as running from then on.

        `more` False: only what was begun.
        """
        job = self._returned() or (self._promotion() or self._new() if more else None)
        if job is not None:
            self._running.add(job.key)
        return job

    def restore(self, job: Job) -> None:
        """A job that an earlier start of the search has begun. Raises ValueError if it cannot have been next."""
        if job.rung:
            self._restore_promotion(job)
            return
        if job.trial != len(self._rungs[0].entered):
            raise ValueError(f"trial {job.trial} cannot have been next")
        self._rungs[0].entered.append(job.trial)
        self.jobs[job.key] = job
        self._waiting.append(job)

    def _restore_promotion(self, job: Job) -> None:
        """With those that were due before it and have not begun: a place may have waited for a faster one. What
        happened counts, also where other constraints would have chosen another trial."""
        while job.key not in self.jobs and (due := self._due()) is not None:
            self._waiting.append(self._promote(*due))
        if job.key in self.jobs:
            return
        below = self._rungs[job.rung - 1]
        if (
            job.trial not in below.entered
            or job.trial in below.promoted
            or not self._is_finished(job.trial, job.rung - 1)
        ):
            raise ValueError(f"trial {job.trial} cannot have reached rung {job.rung}")
        self._waiting.append(self._promote(job.trial, job.rung))

    def finish(self, job: Job, found: TrialResult) -> None:
        self._running.discard(job.key)
        self._waiting = [each for each in self._waiting if each.key != job.key]
        self.results[job.key] = found

    def give_back(self, job: Job) -> None:
        """Whoever did it is gone: somebody else goes on."""
        self._running.discard(job.key)
        self._waiting.append(job)

    # -- how it stands -------------------------------------------------------------------------------------------------

    @property
    def num_rungs(self) -> int:
        return len(self._rungs)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return not self._running and not self._waiting

    @property
    def num_to_come(self) -> int:
        """Jobs that are sure to begin beside those that have."""
        return self.num_trials - len(self._rungs[0].entered)

    @property
    def planned_tokens(self) -> int:
        """Of all jobs that have begun."""
        return sum(self._rung_tokens[job.rung] for job in self.jobs.values())

    @property
    def best(self) -> Job | None:
        """The best of the highest rung that somebody finished with all constraints met."""
        for rung in reversed(range(self.num_rungs)):
            found = [
                job
                for job in self.jobs.values()
                if job.rung == rung and (at := self.results.get(job.key)) and at.score is not None
                and not self.violation(at)
            ]  # fmt: skip
            if found:
                return min(found, key=self._order)
        return None

    @property
    def most_jobs(self) -> int:
        """If all trials are tried."""
        return sum(self.num_trials // self.section.factor**rung for rung in range(self.num_rungs))

    @property
    def whole_tokens(self) -> int:
        """If all trials are tried."""
        return sum(
            self.num_trials // self.section.factor**rung * tokens for rung, tokens in enumerate(self._rung_tokens)
        )

    def job_tokens(self, job: Job) -> int:
        """As planned."""
        return self._rung_tokens[job.rung]

    def ranked(self) -> list[Job]:
        """The finished job of each trial, the longest if there are several; the best first."""
        last = {trial: rung for trial, rung in sorted(self.results)}
        return sorted((self.jobs[key] for key in last.items()), key=self._rank)

    def _rank(self, job: Job) -> tuple[int, float, float, int]:
        if self.results[job.key].score is None:
            return 1, 0.0, 0.0, job.trial
        return -job.rung, *self._order(job)

    def may_go_on(self, job: Job) -> bool:
        """Whether somebody may still need what a finished job has left: its longer run has not ended yet."""
        above = job.rung + 1
        return above < self.num_rungs and (job.trial, above) not in self.results and not self.is_over

    def violation(self, found: TrialResult) -> float:
        return violation(self.section.constraints, found.figures)

    @property
    def is_over(self) -> bool:
        """All has been tried."""
        return len(self._rungs[0].entered) >= self.num_trials and self.is_idle and self._due() is None

    # -- who is next ---------------------------------------------------------------------------------------------------

    def _returned(self) -> Job | None:
        if not self._waiting:
            return None
        job = min(self._waiting, key=lambda job: (-job.rung, job.trial))
        self._waiting.remove(job)
        return job

    def _promotion(self) -> Job | None:
        due = self._due()
        if due is None or not self._may_spend(self._rung_tokens[due[1]]):
            return None
        trial, rung = due
        return self._promote(trial, rung)

    def _promote(self, trial: int, rung: int) -> Job:
        below = self._rungs[rung - 1]
        below.promotions += 1
        below.promoted.add(trial)
        self._rungs[rung].entered.append(trial)
        job = Job(trial=trial, rung=rung, values=self.jobs[trial, rung - 1].values)
        self.jobs[job.key] = job
        return job

    def _due(self) -> tuple[int, int] | None:
        """The trial that goes on to a longer run now, and to which rung; the longest first."""
        for rung in reversed(range(self.num_rungs - 1)):
            at = self._rungs[rung]
            while (looked_at := self._judged(rung)) is not None:
                able = [trial for trial in looked_at if trial not in at.promoted and self._is_usable(trial, rung)]
                if able:
                    return min(able, key=lambda trial: self._order(self.jobs[trial, rung])), rung + 1
                at.promotions += 1
        return None

    def _judged(self, rung: int) -> list[int] | None:
        """The trials that the next promotion from this rung looks at, once all of them are finished."""
        at = self._rungs[rung]
        number = self.section.factor * (at.promotions + 1)
        if len(at.entered) < number or any((trial, rung) not in self.results for trial in at.entered[:number]):
            return None
        return at.entered[:number]

    def _is_finished(self, trial: int, rung: int) -> bool:
        return (trial, rung) in self.results and self._is_usable(trial, rung)

    def _is_usable(self, trial: int, rung: int) -> bool:
        return self.results[trial, rung].score is not None

    def _new(self) -> Job | None:
        number = len(self._rungs[0].entered)
        if number >= self.num_trials or not self._may_spend(self._rung_tokens[0]):
            return None
        known: list[Known] = []
        if self.section.sampler == "tpe":
            behind = range(max(0, number - self.section.ahead + 1))
            if any((trial, 0) not in self.results for trial in behind):
                return None
            known = [self._known(trial) for trial in behind]
        job = Job(trial=number, rung=0, values=self._suggest(number, known))
        self._rungs[0].entered.append(number)
        self.jobs[job.key] = job
        return job

    def _known(self, trial: int) -> Known:
        found = self.results[trial, 0]
        score = math.inf if found.score is None else self._signed(found.score)
        return Known(values=self.jobs[trial, 0].values, score=score, violation=self.violation(found))

    def _may_spend(self, tokens: int) -> bool:
        return not self.section.tokens or self.planned_tokens + tokens <= self.section.tokens

    def _order(self, job: Job) -> tuple[float, float, int]:
        found = self.results[job.key]
        assert found.score is not None
        return self.violation(found), self._signed(found.score), job.trial

    def _signed(self, score: float) -> float:
        return -score if self.section.maximize else score


def violation(constraints: dict[str, ConstraintSection], figures: dict[str, float]) -> float:
    """By what part of the limits they are missed, added up; 0 if all are met. A figure that is not there meets none."""
    missed = 0.0
    for name, limit in constraints.items():
        value = figures.get(name)
        if value is None:
            missed += 1.0
            continue
        if limit.at_most is not None and value > limit.at_most:
            missed += (value - limit.at_most) / max(abs(limit.at_most), 1e-12)
        if limit.at_least is not None and value < limit.at_least:
            missed += (limit.at_least - value) / max(abs(limit.at_least), 1e-12)
    return missed
