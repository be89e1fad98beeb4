"""Places of this machine: processes that train whole runs."""

import os
from pathlib import Path

from cuadrilla.jobs.places import Left, LocalPlace, Places
from cuadrilla.jobs.queue import QueuedRun
from tests.commands import wait_for
from tests.machines import language_run

NAME = "here"


def test_what_is_recalled_while_it_is_made_ready_is_given_back(stories: Path, tmp_path: Path) -> None:
    """Before it loads torch, it has locked its run."""
    run = language_run(tmp_path / "uno", stories)
    place = LocalPlace(name=NAME, threads=1, environment=os.environ)
    places = Places[QueuedRun]([place], logs=tmp_path / "logs")
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
