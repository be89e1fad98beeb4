"""What the folder of a search keeps of jobs that were given back: their time, whoever goes on with them."""

from pathlib import Path

import pytest

from cuadrilla.rundir import append_event
from cuadrilla.tune.folder import LEFT, JobPart, SearchFolder
from cuadrilla.tune.search import Job, TrialResult
from tests.watched import add_rows

pytestmark = pytest.mark.unit


def test_the_parts_of_a_job_and_the_time_of_all_starts(tmp_path: Path) -> None:
    folder = SearchFolder(tmp_path)
    (one, other) = (Job(trial=number, rung=0, values={"optim.lr": 0.1}) for number in (0, 1))
    folder.started()
    for job, place, seconds in ((one, "ana", 3.0), (other, "luis", 2.0), (one, "luis", 0.5)):
        folder.began(job, place=place)
        folder.left(job, place=place, seconds=seconds)
    folder.ended(other, TrialResult(score=1.0, seconds=4.0, place="luis, ana"))
    for damaged in ({}, {"trial": "x", "rung": 0, "seconds": 1}, {"trial": 0, "rung": 0, "seconds": "long"}):
        append_event(folder.trials, LEFT, **damaged)
    assert folder.parts() == {
        (0, 0): [JobPart(place="ana", seconds=3.0), JobPart(place="luis", seconds=0.5)],
        (1, 0): [JobPart(place="luis", seconds=2.0)],
    }
    folder.trials.unlink()
    at = [("started", 100), ("begun", 101), ("left", 130), ("started", 1000), ("begun", 1001), ("ended", 1020)]
    add_rows(folder.trials, [{"time": float(time), "event": event} for event, time in at])
    assert folder.spent_seconds() == 30 + 20
