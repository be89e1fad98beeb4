"""The decisions of a search do not depend on who finishes first, nor on breaks."""

import math
import random
import sys
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.config import TuneSection
from cuadrilla.errors import ConfigError, EnvironmentProblem, ResourceError
from cuadrilla.tune.search import Job, Search, TrialResult, open_storage
from cuadrilla.tune.space import Values
from tests.unit.test_tune_space import space_of

SPACE = space_of("optim.lr = {low = 0.000001, high = 1.0}")


def score_of(job: Job) -> TrialResult:
    """Depends on the values; longer runs are better; now and then one fails."""
    if job.trial % 11 == 5:
        return TrialResult(score=None, reason="it failed")
    return TrialResult(score=abs(float(job.values["optim.lr"]) - 0.3) + 1 / (job.rung + 1), tokens=10)


def section_of(**more: object) -> TuneSection:
    return TuneSection.model_validate({"space": SPACE.dimensions, "sampler": "random", "trials": 32, **more})


def search_of(section: TuneSection, *, storage: optuna.storages.BaseStorage | None = None, space=SPACE) -> Search:
    return Search(section, space=space, storage=storage or optuna.storages.InMemoryStorage())


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


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), places=st.integers(1, 9), rungs=st.integers(1, 4), factor=st.integers(2, 4))
def test_any_machines_in_any_order_try_the_same(seed: int, places: int, rungs: int, factor: int) -> None:
    section = section_of(rungs=rungs, factor=factor)
    alone, together = search_of(section), search_of(section)
    one = carried_out(alone, places=1, chance=random.Random(0))
    assert carried_out(together, places=places, chance=random.Random(seed)) == one
    assert together.best is not None
    assert alone.best == together.best


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), broken_off=st.integers(0, 60))
def test_a_broken_off_search_goes_on_as_if_nothing_had_been(seed: int, broken_off: int) -> None:
    section, chance, storage = section_of(rungs=3, factor=2), random.Random(seed), optuna.storages.InMemoryStorage()
    whole = search_of(section)
    expected = carried_out(whole, places=1, chance=random.Random(1))
    first, running = search_of(section, storage=storage), []
    for _ in range(broken_off):
        while len(running) < 3 and (job := first.next_job()) is not None:
            running.append(job)
        if running:
            job = running.pop(chance.randrange(len(running)))
            if chance.random() < 0.3:
                first.give_back(job)
            else:
                first.finish(job, score_of(job))
    again = search_of(section, storage=storage)
    assert (again.jobs, again.results) == (first.jobs, first.results)
    assert carried_out(again, places=3, chance=chance) == expected
    assert again.best == whole.best


def test_a_storage_keeps_all_of_it_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "año #1?.db"
    section = section_of(trials=4, rungs=2, factor=2)
    first = search_of(section, storage=open_storage(path))
    job = first.next_job()
    assert job is not None
    first.give_back(job)
    first.finish(job, TrialResult(score=0.5, tokens=9, seconds=3.5, place="ana"))
    failed = first.next_job()
    assert failed is not None
    first.finish(failed, TrialResult(score=None, reason="no such layer"))
    under_way = first.next_job()
    again = search_of(section, storage=open_storage(path))
    assert (again.jobs, again.results) == (first.jobs, first.results)
    assert again.next_job() == under_way
    assert path.exists()


def test_a_search_goes_on_with_the_same_settings_only() -> None:
    storage = optuna.storages.InMemoryStorage()
    search_of(section_of(), storage=storage).require_same({"optim.lr": 1, "a": 2}, folder="tune")
    search_of(section_of(), storage=storage).require_same({"optim.lr": 1, "a": 2}, folder="tune")
    with pytest.raises(ConfigError, match=r"began with other settings: optim\.lr"):
        search_of(section_of(), storage=storage).require_same({"optim.lr": 3, "a": 2}, folder="tune")


def test_a_damaged_storage_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"nothing" * 1000)
    with pytest.raises(ResourceError, match="the study of the search cannot be read or written"):
        search_of(section_of(), storage=open_storage(tmp_path / "study.db"))


def test_without_optuna_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna.storages", None)
    with pytest.raises(EnvironmentProblem) as refused:
        open_storage(tmp_path / "study.db")
    assert refused.value.hint == "pip install 'cuadrilla[tune]'"


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


def test_the_highest_is_best_where_that_is_wanted() -> None:
    search = search_of(section_of(maximize=True, trials=8, rungs=2, factor=2))
    while (job := search.next_job()) is not None:
        search.finish(job, TrialResult(score=float(job.values["optim.lr"])))
    assert search.best is not None
    highest = max(job.values["optim.lr"] for job in search.jobs.values())
    assert search.best.values["optim.lr"] == highest


def tpe_search(trials: int, **more: object) -> Search:
    space = space_of("optim.lr = {low = 0.0001, high = 1.0, log = true}\nmodel.layers = {low = 1, high = 8}")
    told = {"space": space.dimensions, "sampler": "tpe", "trials": trials, **more}
    return search_of(TuneSection.model_validate(told), space=space)


def test_tpe_learns() -> None:
    search = tpe_search(40)
    while (job := search.next_job()) is not None:
        search.finish(job, TrialResult(score=abs(math.log10(float(job.values["optim.lr"])) + 2)))
    off = [found.score or 0.0 for found in search.results.values()]
    assert sum(off[20:]) / 20 < 0.7  # by chance: 1


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
