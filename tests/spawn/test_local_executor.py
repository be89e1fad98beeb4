"""Processes of this machine that train whole runs."""

from pathlib import Path

from cuadrilla.jobs.executor import Ended
from cuadrilla.jobs.local import LocalExecutor
from cuadrilla.plan.devices import Use
from tests.commands import TASK, make_run, wait_for
from tests.machines import language_run

NAME = "here"
HERE = {NAME: Use(name="", device="", threads=1)}


def ended(executor: LocalExecutor) -> Ended:
    """The job that ends next."""
    left: list[Ended] = []
    wait_for(lambda: left.extend(executor.poll()) or bool(left))
    return left[0]


def test_a_task_may_print_as_much_as_it_likes_and_one_that_ends_its_process_has_lost_its_job(tmp_path: Path) -> None:
    """More than a pipe takes, in one process for all jobs."""
    prints, exits = (make_run(tmp_path / name, steps=4) for name in ("uno", "dos"))
    loss, executor = "def loss(self, model, batch):", LocalExecutor(HERE, logs=tmp_path / "logs")
    (prints.path / "task.py").write_text(TASK.replace(loss, f'{loss} print("x" * 40_000);'))
    (exits.path / "task.py").write_text("import os\n" + TASK.replace(loss, f"{loss} os._exit(0);"))
    try:
        executor.start("uno", prints, place=NAME)
        assert ended(executor).complete
        executor.start("dos", exits, place=NAME)
        left = ended(executor)
    finally:
        executor.close()
    assert (tmp_path / "logs" / f"{NAME}.txt").stat().st_size > 2**17
    assert (left.lost, left.reason) == (True, "its process ended without a result")


def test_what_is_recalled_while_it_is_made_ready_is_given_back(stories: Path, tmp_path: Path) -> None:
    """Before it loads torch, it has locked its run."""
    run = language_run(tmp_path / "uno", stories)
    executor = LocalExecutor(HERE, logs=tmp_path / "logs")
    try:
        executor.start("uno", run, place=NAME)
        wait_for(run.lock.exists)
        executor.preempt("uno")
        left = ended(executor)
    finally:
        executor.close()
    assert (left.job, left.complete, left.reason) == ("uno", False, "")
