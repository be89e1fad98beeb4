"""The decisions of a search do not depend on who finishes first, nor on breaks."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.config import ConstraintSection, DimensionSection, TuneSection
from cuadrilla.tune.run import place_speeds
from cuadrilla.tune.sampler import Known, make_sampler
from cuadrilla.tune.search import Job, Search, TrialResult, violation
from cuadrilla.tune.space import Space, Values
from tests.unit.test_tune_space import space_of

SPACE = {"optim.lr": DimensionSection(low=0.0, high=1.0)}


def random_values(number: int, _known: Sequence[Known]) -> Values:
    return {"optim.lr": random.Random(number).random()}


def score_of(job: Job) -> TrialResult:
    """Depends on the values; longer runs are better; now and then one fails."""
    if job.trial % 11 == 5:
        return TrialResult(score=None, reason="it failed")
    return TrialResult(score=abs(float(job.values["optim.lr"]) - 0.3) + 1 / (job.rung + 1), tokens=10)


def section_of(**more: object) -> TuneSection:
    return TuneSection.model_validate({"space": SPACE, "sampler": "random", "trials": 32, **more})


def search_of(section: TuneSection, *, suggest=random_values) -> Search:
    tokens = [100 * section.factor**rung for rung in range(section.rungs)]
    return Search(section, suggest=suggest, num_trials=section.trials, rung_tokens=tokens)


def carried_out(search: Search, *, places: int, chance: random.Random) -> list[tuple[str, Values]]:
    """Places that take jobs and end them in any order; what was tried, sorted."""
    running: list[Job] = []
    while True:
        while len(running) < places and (job := search.next_job()) is not None:
            running.append(job)
        if not running:
            assert search.is_idle
            return sorted((job.name, job.values) for job in search.jobs.values())
        job = running.pop(chance.randrange(len(running)))
        if chance.random() < 0.2:
            search.give_back(job)
        else:
            search.finish(job, score_of(job))


@given(seed=st.integers(0, 10_000), places=st.integers(1, 9), rungs=st.integers(1, 4), factor=st.integers(2, 4))
def test_any_machines_in_any_order_try_the_same(seed: int, places: int, rungs: int, factor: int) -> None:
    section = section_of(rungs=rungs, factor=factor)
    alone, together = search_of(section), search_of(section)
    one = carried_out(alone, places=1, chance=random.Random(0))
    assert carried_out(together, places=places, chance=random.Random(seed)) == one
    assert together.best is not None
    assert alone.best == together.best


@given(seed=st.integers(0, 10_000), broken_off=st.integers(0, 60))
def test_a_broken_off_search_goes_on_as_if_nothing_had_been(seed: int, broken_off: int) -> None:
    section, chance = section_of(rungs=3, factor=2), random.Random(seed)
    whole = search_of(section)
    expected = carried_out(whole, places=1, chance=random.Random(1))
    first, happened, running, given_back = search_of(section), [], [], []
    for _ in range(broken_off):
        while len(running) < 3 and (job := first.next_job()) is not None:
            if job.rung and running and chance.random() < 0.3:  # its place waits for a faster one
                given_back.append(job)
            else:
                running.append(job)
                happened.append((job, None))
        while given_back:
            first.give_back(given_back.pop())
        if running:
            job = running.pop(chance.randrange(len(running)))
            happened.append((job, score_of(job)))
            first.finish(job, score_of(job))
    again = search_of(section)
    for job, found in happened:
        if found is None:
            again.restore(job)
        else:
            again.finish(again.jobs[job.key], found)
    assert carried_out(again, places=3, chance=chance) == expected
    assert again.best == whole.best


def test_other_constraints_later_change_nothing_that_has_happened() -> None:
    section = section_of(trials=16, rungs=2, factor=4)
    first = search_of(section)
    carried_out(first, places=1, chance=random.Random(0))
    again = search_of(section_of(trials=16, rungs=2, factor=4, constraints={"size": ConstraintSection(at_most=0.0)}))
    for job in first.jobs.values():
        again.restore(job)
        again.finish(again.jobs[job.key], first.results[job.key])
    assert set(again.jobs) == set(first.jobs)
    assert again.best is None


def test_a_quarter_goes_on() -> None:
    section = section_of(trials=64, rungs=3, factor=4)
    search = search_of(section)
    carried_out(search, places=5, chance=random.Random(3))
    counts = [sum(job.rung == rung for job in search.jobs.values()) for rung in range(3)]
    assert counts == [64, 16, 4]
    assert search.best is not None
    assert search.best.rung == 2
    first = {job.trial: search.results[job.key].score for job in search.jobs.values() if job.rung == 0}
    best = min((score, trial) for trial, score in first.items() if score is not None)[1]
    assert search.best.trial == best


def test_a_history_that_cannot_have_been_is_refused() -> None:
    search = search_of(section_of(rungs=2))
    with pytest.raises(ValueError, match="trial 3 cannot have been next"):
        search.restore(Job(trial=3, rung=0, values={}))
    with pytest.raises(ValueError, match="cannot have reached rung 1"):
        search.restore(Job(trial=0, rung=1, values={}))


def test_tokens_are_a_limit() -> None:
    section = section_of(tokens=1000, rungs=2, factor=4)
    search = search_of(section)
    carried_out(search, places=2, chance=random.Random(0))
    assert search.planned_tokens <= 1000
    assert {job.rung for job in search.jobs.values()} == {0, 1}


def test_what_misses_a_constraint_is_not_the_best() -> None:
    section = section_of(constraints={"size": ConstraintSection(at_most=0.5)}, trials=8)
    search = search_of(section)
    while (job := search.next_job()) is not None:
        size = float(job.values["optim.lr"])
        search.finish(job, TrialResult(score=1 - size, figures={"size": size}))
    assert search.best is not None
    assert float(search.best.values["optim.lr"]) <= 0.5
    assert violation({"size": ConstraintSection(at_least=2.0)}, {"size": 1.0}) == pytest.approx(0.5)
    assert violation({"sise": ConstraintSection(at_least=2.0)}, {"size": 3.0}) == 1  # nobody knows


def test_the_highest_is_best_where_that_is_wanted() -> None:
    search = search_of(section_of(maximize=True, trials=8, rungs=2, factor=2))
    while (job := search.next_job()) is not None:
        search.finish(job, TrialResult(score=float(job.values["optim.lr"])))
    assert search.best is not None
    highest = max(job.values["optim.lr"] for job in search.jobs.values())
    assert search.best.values["optim.lr"] == highest


def tpe_search(trials: int, **more: object) -> tuple[Space, Search]:
    space = space_of("optim.lr = {low = 0.0001, high = 1.0, log = true}\nmodel.layers = {low = 1, high = 8}")
    section = TuneSection.model_validate(
        {"space": space.dimensions, "sampler": "tpe", "trials": trials, "ahead": 3, **more}
    )
    suggest, number = make_sampler(section, space)
    return space, Search(section, suggest=suggest, num_trials=number, rung_tokens=[100])


def test_tpe_is_the_same_on_one_machine_and_on_three() -> None:
    _, alone = tpe_search(18)
    _, together = tpe_search(18)
    one = carried_out(alone, places=1, chance=random.Random(0))
    assert carried_out(together, places=3, chance=random.Random(5)) == one


def test_tpe_begins_as_a_random_search_of_the_same_seed() -> None:
    found = []
    for sampler in ("tpe", "random"):
        _, search = tpe_search(24, sampler=sampler, ahead=1)
        carried_out(search, places=1, chance=random.Random(0))
        found.append([search.jobs[trial, 0].values for trial in range(24)])
    tpe, by_chance = found
    assert tpe[:10] == by_chance[:10]
    assert tpe[20:] != by_chance[20:]


def test_tpe_learns() -> None:
    _, search = tpe_search(40)
    while (job := search.next_job()) is not None:
        search.finish(job, TrialResult(score=abs(math.log10(float(job.values["optim.lr"])) + 2)))
    late = [float(job.values["optim.lr"]) for job in search.jobs.values() if job.trial >= 30]
    near = sum(0.003 < value < 0.03 for value in late)  # by chance: a quarter
    assert near >= 6, late


def test_what_a_longer_run_goes_on_from_is_needed_until_that_has_ended() -> None:
    search = search_of(section_of(trials=2, rungs=2, factor=2))
    jobs = [search.next_job(), search.next_job()]
    for job in jobs:
        assert job is not None
        search.finish(job, score_of(job))
    longer = search.next_job()
    assert longer is not None
    below = search.jobs[longer.trial, 0]
    assert search.may_go_on(below)
    search.give_back(longer)
    assert search.may_go_on(below)
    assert search.next_job() == longer
    search.finish(longer, score_of(longer))
    assert not search.may_go_on(below)
    assert search.is_over


def test_the_speed_of_a_place_is_that_of_jobs_it_did_alone() -> None:
    search = search_of(section_of(trials=5, rungs=1))
    for place, seconds in (("ana", 10.0), ("ana", 20.0), ("ana, luis", 1.0), ("", 1.0), ("luis", 50.0)):
        job = search.next_job()
        assert job is not None
        search.finish(job, TrialResult(score=1.0, seconds=seconds, place=place))
    assert place_speeds(search) == {"ana": 7.5, "luis": 2.0}
