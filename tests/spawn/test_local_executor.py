"""Processes of this machine that train whole runs."""

from pathlib import Path

from cuadrilla.jobs.executor import Ended
from cuadrilla.jobs.local import LocalExecutor
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import RunDir
from tests.commands import TASK, make_run, wait_for
from tests.machines import language_run

NAME = "here"
HERE = {NAME: Use(name="", device="", threads=1)}


def carried_out(executor: LocalExecutor, run: RunDir) -> list[Ended]:
    """One job, once."""
    left: list[Ended] = []
    try:
        executor.start("uno", run, place=NAME)
        wait_for(lambda: left.extend(executor.poll()) or bool(left))
    finally:
        executor.close()
    return left


def test_a_task_may_print_as_much_as_it_likes(tmp_path: Path) -> None:
    """More than a pipe takes, in one process for all jobs."""
    run, loss = make_run(tmp_path / "uno", steps=4), "def loss(self, model, batch):"
    (run.path / "task.py").write_text(TASK.replace(loss, f'{loss} print("x" * 40_000);'))
    (left,) = carried_out(LocalExecutor(HERE, logs=tmp_path / "logs"), run)
    assert left.complete
    assert (tmp_path / "logs" / f"{NAME}.txt").stat().st_size > 2**17


def test_a_process_that_ends_without_a_result_has_lost_its_job(tmp_path: Path) -> None:
    run, loss = make_run(tmp_path / "uno", steps=4), "def loss(self, model, batch):"
    (run.path / "task.py").write_text("import os\n" + TASK.replace(loss, f"{loss} os._exit(0);"))
    (left,) = carried_out(LocalExecutor(HERE, logs=tmp_path / "logs"), run)
    assert (left.lost, left.reason) == (True, "its process ended without a result")


def test_what_is_recalled_while_it_is_made_ready_is_given_back(stories: Path, tmp_path: Path) -> None:
    """Before it loads torch, it has locked its run."""
    run = language_run(tmp_path / "uno", stories)
    executor = LocalExecutor(HERE, logs=tmp_path / "logs")
    left: list[Ended] = []
    try:
        executor.start("uno", run, place=NAME)
        wait_for(run.lock.exists)
        executor.preempt("uno")
        wait_for(lambda: left.extend(executor.poll()) or bool(left))
    finally:
        executor.close()
    assert [(each.job, each.complete, each.reason) for each in left] == [("uno", False, "")]
