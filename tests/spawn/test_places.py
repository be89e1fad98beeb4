"""Places of this machine: processes that train whole runs."""

import os
from pathlib import Path

from cuadrilla.jobs.places import Left, LocalPlace, Places, keep_short
from cuadrilla.jobs.queue import QueuedRun
from cuadrilla.rundir import RunDir
from tests.commands import TASK, make_run, wait_for
from tests.machines import language_run

NAME = "here"
HERE = LocalPlace(name=NAME, threads=1, environment=os.environ)


def carried_out(places: Places[QueuedRun], run: RunDir) -> list[Left[QueuedRun]]:
    """One job, begun again until it is complete or has failed."""
    left: list[Left[QueuedRun]] = []
    try:
        while not left or not (left[-1].complete or left[-1].reason):
            places.start(QueuedRun(name="uno", run=run, order=1), run, name=NAME)
            wait_for(lambda: bool(places.free) or left.extend(places.look()) or bool(places.free))
    finally:
        places.close()
    return left


def test_a_task_may_print_as_much_as_it_likes(tmp_path: Path) -> None:
    """More than a pipe takes, in one process for all jobs."""
    run, loss = make_run(tmp_path / "uno", steps=4), "def loss(self, model, batch):"
    (run.path / "task.py").write_text(TASK.replace(loss, f'{loss} print("x" * 40_000);'))
    (left,) = carried_out(Places([HERE], logs=tmp_path / "logs"), run)
    assert left.complete
    assert (tmp_path / "logs" / f"{NAME}.txt").stat().st_size > 2**17


def test_a_process_that_ends_without_a_result_fails_its_job_in_the_end(tmp_path: Path) -> None:
    run, loss = make_run(tmp_path / "uno", steps=4), "def loss(self, model, batch):"
    (run.path / "task.py").write_text("import os\n" + TASK.replace(loss, f"{loss} os._exit(0);"))
    left = carried_out(Places([HERE], logs=tmp_path / "logs"), run)
    assert [each.reason for each in left] == ["", "", "its process ended without a result"]


def test_what_is_printed_for_ever_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Whoever prints goes on behind the part that is kept."""
    talk = tmp_path / "talk.txt"
    with open(talk, "ab", buffering=0) as printing:
        printing.write(b"x" * 2**26 + b"y" * 2**20)
        keep_short(talk)
        printing.write(b"z")
    assert talk.read_bytes() == b"y" * 2**20 + b"z"
    keep_short(talk)
    assert talk.stat().st_size == 2**20 + 1
    keep_short(tmp_path / "not-there.txt")


def test_what_is_recalled_while_it_is_made_ready_is_given_back(stories: Path, tmp_path: Path) -> None:
    """Before it loads torch, it has locked its run."""
    run = language_run(tmp_path / "uno", stories)
    places = Places[QueuedRun]([HERE], logs=tmp_path / "logs")
    job = QueuedRun(name="uno", run=run, order=1)
    left: list[Left[QueuedRun]] = []
    try:
        places.start(job, run, name=NAME)
        wait_for(run.lock.exists)
        places.recall(job)
        wait_for(lambda: left.extend(places.look()) or bool(left))
    finally:
        places.close()
    assert [(each.job.name, each.complete, each.reason) for each in left] == [("uno", False, "")]
