"""Searches over a function by the containers of `docker compose --profile dask`: scikit-learn, and XGBoost with Optuna.

The programs that type the commands and those that make the calls are containers: what the searches need beside
cuadrilla is in the image.
"""

import json
import shutil
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from cuadrilla.rundir import read_jsonl
from tests.commands import wait_for
from tests.docker.conftest import Project
from tests.images import ROOT
from tests.ports import free_port

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

DASK = ("--profile", "dask")
SCHEDULER = ("--scheduler", "tcp://scheduler:8786", "--insecure-scheduler")
GUESSED = 0.66
"""The loss of who always says how frequent each class is."""


def start_two_workers(project: Project) -> None:
    port = str(free_port())
    project.compose(*DASK, "up", "--detach", "--scale", "dask-worker=2", DASK_PORT=port)
    wait_for(lambda: project.compose(*DASK, "logs", "dask-worker").count("Registered to") >= 2)


def search(project: Project, example: str, *, trials: int) -> tuple[Path, str]:
    """The folder of a finished search, and what it said."""
    folder = shutil.copytree(ROOT / "examples" / "trees" / example, project.folder / example)
    options = (*SCHEDULER, "--set", f"tune.trials={trials}")
    said = project.compose("run", "--rm", "trainer", "cuadrilla", "--json", "tune", example, *options)
    return folder / "tune", said


def calls(found: Path) -> list[dict]:
    """Those that have ended. Both workers have made some."""
    ended = [row for row in read_jsonl(found / "trials.jsonl") if row["event"] == "ended"]
    assert len({row["place"] for row in ended}) == 2
    return ended


def trials_in(store: Path) -> list[FrozenTrial]:
    """Of the only study in it, as optuna-dashboard reads them."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{store}")
    try:
        return optuna.load_study(study_name=None, storage=storage).trials
    finally:
        storage.engine.dispose()


def test_a_forest_and_boosted_trees_by_two_workers(project: Project) -> None:
    start_two_workers(project)
    found, said = search(project, "forest", trials=4)
    best = json.loads((found / "best.json").read_text())
    assert best["score"] > 0.9  # 0.1 by chance
    assert best["trial"] in said
    assert len(calls(found)) == 5
    assert (found / best["trial"] / "logs" / "talk.txt").read_text().count("trees") == 1

    found, said = search(project, "boosted", trials=2)
    best = json.loads((found / "best.json").read_text())
    assert best["score"] < GUESSED
    assert best["trial"] in said
    scores = {row["trial"]: row["score"] for row in calls(found)}
    trials = trials_in(found / "study.db")
    assert {trial.number: trial.value for trial in trials} == scores
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert {trial.user_attrs["place"] for trial in trials} == {row["place"] for row in calls(found)}
    assert best["values"] == min(trials, key=lambda trial: trial.value).params
