"""A real search: its results, and that a killed or ended process loses and changes nothing."""

import json
import shutil
import signal
from pathlib import Path

import optuna
import psutil
import pytest

from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.runfile import read_run_file
from cuadrilla.tune.folder import describe
from cuadrilla.tune.search import STUDY, job_of, open_storage, score_of
from tests.commands import RUN, TASK, begin, ended, wait_for
from tests.inside import cuadrilla
from tests.machines import Machine, invite

TUNE = """
[tune]
sampler = "random"
trials = 3
seed = 3
[tune.space]
optim.lr = {low = 0.0001, high = 0.1, log = true}
"""


def make_search(folder: Path, *, steps: int = 40, tune: str = TUNE) -> Path:
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "run.toml").write_text(RUN.format(steps=steps) + tune)
    return folder


def results(folder: Path) -> dict[str, tuple[str, float | None]]:
    """Values and scores of the trials that have ended, by the name of the job."""
    trials = optuna.load_study(study_name=STUDY, storage=open_storage(folder / "tune" / "study.db")).trials
    return {job_of(trial): (describe(trial.params), score_of(trial)) for trial in trials if trial.state.is_finished()}


def steps_of(run: RunDir) -> list[int]:
    return [row["version"] for row in read_jsonl(run.metrics)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_search(tmp_path_factory.mktemp("search") / "año #1? 50%")
    done = cuadrilla("tune", folder, "--json", code=0)
    rows = json.loads(done.stdout)
    assert [row["score"] for row in rows[:2]] == sorted(row["score"] for row in rows[:2])
    return folder


def test_the_best_is_a_run_of_its_own(finished: Path) -> None:
    found = results(finished)
    config = read_run_file(finished / "tune" / "best" / "run.toml").config
    assert isinstance(config.optim.lr, float)
    (kept,) = {path.parents[1] for path in (finished / "tune").glob("t*/checkpoints/v*")}  # all other weights are gone
    assert found[kept.name][0] == f"optim.lr={config.optim.lr:.4g}"
    assert config.tune.space == {}
    cuadrilla("train", finished / "tune" / "best", "--stop-at", "1", code=0)


def test_other_settings_are_refused(finished: Path) -> None:
    refused = cuadrilla("tune", finished, "--set", "tune.seed=4", code=2)
    assert "this search began with other settings" in refused.stderr
    cuadrilla("tune", finished, "--set", "optim.beta2=0.9", code=2)
    assert "3 trials are finished" in cuadrilla("tune", finished, "--set", "tune.trials=2", code=0).stderr


def test_what_was_set_for_the_run_itself_is_not_the_searchs(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "again")
    assert cuadrilla("train", folder, "--set", "train.steps=3").returncode == 0
    assert "3 trials are finished" in cuadrilla("tune", folder, code=0).stderr
    assert results(folder) == results(finished), "there was nothing more to do"


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_search_that_was_broken_off_is_the_same(how: signal.Signals, finished: Path, tmp_path: Path) -> None:
    """A trial's process is killed, and then the search is stopped during another trial. No finished trial is lost, and
    the results are the same as without interruptions."""
    folder = make_search(tmp_path / "run")
    process = begin("tune", folder)
    if how == signal.SIGKILL:
        wait_for(lambda: bool(steps_of(RunDir(folder / "tune" / "t0000"))), process)
        psutil.Process(process.pid).children()[0].kill()
    wait_for(lambda: bool(steps_of(RunDir(folder / "tune" / "t0001"))), process)
    (child,) = psutil.Process(process.pid).children()
    before = results(folder)
    assert "t0000" in before
    process.send_signal(how)
    assert "Traceback" not in ended(process, code=130 if how == signal.SIGINT else -how)
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    cuadrilla("tune", folder, code=0)
    after = results(folder)
    assert before.items() <= after.items()
    assert after == results(finished)


@pytest.mark.thorough
def test_a_search_over_machines_that_join_is_the_same(coordinator: Machine, ana: Machine, finished: Path) -> None:
    folder = make_search(coordinator.home.parent / "run")
    ana.trust(RunDir(folder))
    process = coordinator.start("tune", str(folder), "--crew", "--listen", "127.0.0.1:0")
    wait_for(lambda: Home(coordinator.home).open_file.exists(), process)
    working = ana.start("join", "--name", "ana", says=invite(coordinator))
    assert process.wait(timeout=150) == 0
    assert working.wait(timeout=60) == 0
    assert results(folder) == results(finished)
    assert not list(Home(ana.home).jobs.glob("*/*/t*"))


def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "run", tune=TUNE.replace("trials = 3", "trials = 2"))
    (folder / "task.py").write_text(
        TASK.replace("def model(self): ", "def model(self): raise ValueError('no such layer')\n    def other(self): ")
    )
    done = cuadrilla("tune", folder, code=0)
    assert done.stderr.count("no such layer") == 2
    assert "all trials that have ended have failed" in done.stderr
