"""The decisions of a search: its trials depend neither on the order in which they end, nor on interruptions."""

import random
import sys
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.config import TuneSection
from cuadrilla.errors import EnvironmentProblem, ResourceError
from cuadrilla.jobs.executor import Ended
from cuadrilla.rundir import write_json
from cuadrilla.tune.search import Search, open_storage, score_of, storing
from tests.unit.test_tune_space import BASE, space_of
from tests.watched import add_rows

SPACE = space_of("optim.lr = {low = 0.000001, high = 1.0}")


def section_of(**more: object) -> TuneSection:
    return TuneSection.model_validate({"space": SPACE.dimensions, "sampler": "random", "trials": 32, **more})


def search_of(
    section: TuneSection, *, storage: optuna.storages.BaseStorage | None = None, folder: Path = Path("none")
) -> Search:
    held = storage or optuna.storages.InMemoryStorage()
    return Search(section, space=SPACE, storage=held, folder=folder)


def finish(search: Search, job: str, score: float | None = None) -> None:
    search.finish(Ended(job=job, place="ana", reason="" if score else "it failed"), score=score)


def results(search: Search) -> list[tuple[object, ...]]:
    return [(trial.number, trial.params, score_of(trial), trial.user_attrs) for trial in search.trials]


def carried_out(search: Search, *, places: int = 1, until: int = 10**6, chance: random.Random) -> Search:
    """Run a search on machines that end their trials in any order or give them back, at most `until` of them. Some
    trials fail."""
    running: list[str] = []
    while until > 0:
        while len(running) < places and (job := search.next_job()) is not None:
            running.append(job)
        if not running:
            assert search.is_done
            break
        job, until = running.pop(chance.randrange(len(running))), until - 1
        if chance.random() < 0.2:
            search.ended(Ended(job=job, place="ana"))
        else:
            trial = search.trial(job)
            finish(search, job, None if trial.number % 11 == 5 else abs(trial.params["optim.lr"] - 0.3))
    return search


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), places=st.integers(1, 9), broken_off=st.integers(0, 40))
def test_any_machines_in_any_order_with_a_break_try_the_same(seed: int, places: int, broken_off: int) -> None:
    alone = carried_out(search_of(section_of()), chance=random.Random(0))
    chance, storage = random.Random(seed), optuna.storages.InMemoryStorage()
    first = carried_out(search_of(section_of(), storage=storage), places=places, until=broken_off, chance=chance)
    again = search_of(section_of(), storage=storage)
    assert results(again) == results(first)
    assert results(carried_out(again, places=places, chance=chance)) == results(alone)
    assert again.best is not None
    assert score_of(again.best) == min(filter(None, map(score_of, alone.trials)))


def test_a_run_that_is_behind_is_called_back_and_counts_as_stopped(tmp_path: Path) -> None:
    """Runs may have different numbers of steps: what counts is the part of each."""
    search = search_of(section_of(trials=6, prune=True), folder=tmp_path)
    for number in range(6):
        job = search.next_job()
        assert job is not None
        run = search.run(job)
        run.path.mkdir()
        run.run_file.write_text(BASE)
        num_steps, loss = (200, 1.0) if number < 5 else (800, 9.0)
        write_json(run.config, {"num_steps": num_steps})
        add_rows(run.metrics, [{"version": num_steps // 10, "val_loss": loss}])
        assert list(search.unwanted()) == [], "too early"
        add_rows(run.metrics, [{"version": num_steps // 2, "val_loss": loss}])
        assert list(search.unwanted()) == ([] if number < 5 else [job])
        search.ended(Ended(job=job, place="ana", complete=number < 5))
    last = search.trials[-1]
    assert (last.state.name, score_of(last), search.is_done) == ("PRUNED", None, True)
    assert last.user_attrs["reason"].startswith("worse than the median")


def test_a_damaged_storage_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"nothing" * 1000)
    with pytest.raises(ResourceError, match="the study of the search cannot be read or written"), storing():
        search_of(section_of(), storage=open_storage(tmp_path / "study.db"))


def test_without_optuna_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna.exceptions", None)
    with pytest.raises(EnvironmentProblem) as refused, storing():
        pass
    assert refused.value.hint == "pip install 'cuadrilla[tune]'"


def test_the_highest_is_best_where_that_is_wanted() -> None:
    search = search_of(section_of(maximize=True, trials=8))
    while (job := search.next_job()) is not None:
        finish(search, job, search.trial(job).params["optim.lr"])
    assert search.best is not None
    assert search.best.params["optim.lr"] == max(trial.params["optim.lr"] for trial in search.trials)
