"""The decisions of a search: what is tried does not depend on who ends first, nor on breaks."""

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
from cuadrilla.tune.folder import SearchFolder
from cuadrilla.tune.run import Searching
from cuadrilla.tune.search import RunResult, Search, Trial, open_storage, storing
from cuadrilla.tune.trial import Base
from tests.unit.test_queue import Hands
from tests.unit.test_tune_space import space_of

SPACE = space_of("optim.lr = {low = 0.000001, high = 1.0}")


def score_of(trial: Trial) -> RunResult:
    """Depends on the values; longer runs are better; now and then one fails."""
    if trial.number % 11 == 5:
        return RunResult(score=None, reason="it failed")
    return RunResult(score=abs(float(trial.values["optim.lr"]) - 0.3) + 1 / (trial.rung + 1))


def section_of(**more: object) -> TuneSection:
    return TuneSection.model_validate({"space": SPACE.dimensions, "sampler": "random", "trials": 32, **more})


def search_of(section: TuneSection, *, storage: optuna.storages.BaseStorage | None = None, space=SPACE) -> Search:
    return Search(section, space=space, storage=storage or optuna.storages.InMemoryStorage())


def carried_out(search: Search, *, places: int = 1, until: int = 10**6, chance: random.Random) -> Search:
    """By places that train trials and end them in any order, or give them back; at most `until` times."""
    running: list[Trial] = []
    while until > 0:
        while len(running) < places and (trial := search.next_trial()) is not None:
            running.append(trial)
        if not running:
            assert search.has_tried_all
            break
        trial, until = running.pop(chance.randrange(len(running))), until - 1
        if chance.random() < 0.2:
            search.give_back(trial)
        else:
            search.finish(trial, score_of(trial))
    return search


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), places=st.integers(1, 9), rungs=st.integers(1, 4), factor=st.integers(2, 4))
def test_any_machines_in_any_order_try_the_same(seed: int, places: int, rungs: int, factor: int) -> None:
    section = section_of(rungs=rungs, factor=factor)
    alone = carried_out(search_of(section), chance=random.Random(0))
    together = carried_out(search_of(section), places=places, chance=random.Random(seed))
    assert together.trials == alone.trials
    assert together.best == alone.best is not None


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), broken_off=st.integers(0, 60))
def test_a_broken_off_search_goes_on_as_if_nothing_had_been(seed: int, broken_off: int) -> None:
    section, chance, storage = section_of(rungs=3, factor=2), random.Random(seed), optuna.storages.InMemoryStorage()
    first = carried_out(search_of(section, storage=storage), places=3, until=broken_off, chance=chance)
    again = search_of(section, storage=storage)
    assert again.trials == first.trials
    carried_out(again, places=3, chance=chance)
    assert again.trials == carried_out(search_of(section), chance=chance).trials


def test_a_storage_keeps_all_of_it_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "año #1?.db"
    section = section_of(trials=4, rungs=2, factor=2)
    first = search_of(section, storage=open_storage(path))
    trial = first.next_trial()
    assert trial is not None
    first.give_back(trial)
    first.finish(trial, RunResult(score=0.5, seconds=3.5, place="ana"))
    failed = first.next_trial()
    assert failed is not None
    first.finish(failed, RunResult(score=None, reason="no such layer"))
    assert first.next_trial() is trial, "the other one has failed"
    first.finish(trial, RunResult(score=0.25))
    under_way = first.next_trial()
    again = search_of(section, storage=open_storage(path))
    assert again.trials == first.trials
    assert again.next_trial() == under_way
    assert path.exists()


def test_a_search_goes_on_with_the_same_settings_only() -> None:
    storage = optuna.storages.InMemoryStorage()
    search_of(section_of(), storage=storage).require_same({"optim.lr": 1, "a": 2}, folder="tune")
    search_of(section_of(), storage=storage).require_same({"optim.lr": 1, "a": 2}, folder="tune")
    with pytest.raises(ConfigError, match=r"began with other settings: optim\.lr"):
        search_of(section_of(), storage=storage).require_same({"optim.lr": 3, "a": 2}, folder="tune")


def test_a_damaged_storage_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"nothing" * 1000)
    with pytest.raises(ResourceError, match="the study of the search cannot be read or written"), storing():
        search_of(section_of(), storage=open_storage(tmp_path / "study.db"))


def test_without_optuna_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna.exceptions", None)
    with pytest.raises(EnvironmentProblem) as refused, storing():
        pass
    assert refused.value.hint == "pip install 'cuadrilla[tune]'"


def test_a_quarter_goes_on() -> None:
    search = carried_out(search_of(section_of(trials=64, rungs=3, factor=4)), places=5, chance=random.Random(3))
    assert [sum(trial.rung > rung for trial in search.trials) for rung in range(3)] == [64, 16, 4]
    first = [(trial.results[0].score, trial) for trial in search.trials if trial.results[0].score is not None]
    assert search.best is min(first, key=lambda found: found[0] or 0)[1]


def test_the_highest_is_best_where_that_is_wanted() -> None:
    search = search_of(section_of(maximize=True, trials=8, rungs=2, factor=2))
    while (trial := search.next_trial()) is not None:
        search.finish(trial, RunResult(score=float(trial.values["optim.lr"])))
    assert search.best is not None
    assert search.best.values["optim.lr"] == max(trial.values["optim.lr"] for trial in search.trials)


def tpe_search(trials: int, **more: object) -> Search:
    space = space_of("optim.lr = {low = 0.0001, high = 1.0, log = true}\nmodel.layers = {low = 1, high = 8}")
    told = {"space": space.dimensions, "sampler": "tpe", "trials": trials, **more}
    return search_of(TuneSection.model_validate(told), space=space)


def test_tpe_learns() -> None:
    search = tpe_search(40)
    while (trial := search.next_trial()) is not None:
        search.finish(trial, RunResult(score=abs(math.log10(float(trial.values["optim.lr"])) + 2)))
    off = [trial.score or 0.0 for trial in search.trials]
    assert sum(off[20:]) / 20 < 0.7  # by chance: 1


@pytest.mark.parametrize("seconds", [(1.0, 2.0, 3.0), (2.0, 2.0, 2.0)])
def test_the_last_run_is_for_the_fastest_place(seconds: tuple[float, ...], tmp_path: Path) -> None:
    """Of those that are equally fast any takes it."""
    section = section_of(trials=4)
    search, hands = search_of(section), Hands("ana", "luis", "eva")
    base = Base(text="", folder=tmp_path, sets=(), section=section)
    work = Searching(base=base, folder=SearchFolder(tmp_path), search=search, executors=[hands], rung_steps=[10])
    for place, took in zip(hands.places, seconds, strict=True):
        trial = search.next_trial()
        assert trial is not None
        search.finish(trial, RunResult(score=1.0, seconds=took, place=place))
    taken = {place: work.next_job(place, "cpu") for place in ("eva", "luis", "ana")}
    assert [place for place, job in taken.items() if job] == ["ana" if seconds[0] < seconds[1] else "eva"]
