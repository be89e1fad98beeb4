"""The dashboard's answers about a queue and about searches: which there are, what their streams tell, who may ask."""

import json
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.jobs.queue import RunQueue
from cuadrilla.rundir import RunDir
from tests.dashboards import ShownDashboard, shown
from tests.searches import WrittenSearch
from tests.watched import WrittenCrew, hold_lock

pytestmark = pytest.mark.inproc


def keys(dashboard: ShownDashboard) -> list[str]:
    return [row["key"] for row in json.loads(dashboard.ask("/api/runs")[1])["runs"]]


@pytest.fixture
def queue(tmp_path: Path) -> RunQueue:
    """Of a run that is shown anyhow, and of one in another folder."""
    queue = RunQueue(tmp_path / "home" / "queue")
    for place in ("runs/casa", "elsewhere/otra"):
        run = WrittenCrew(folder=tmp_path / place, speeds={"ana": 1.0}, rounds=5).write()
        queue.add(run)
    return queue


def test_a_queue(tmp_path: Path, queue: RunQueue) -> None:
    """Its runs can be looked at wherever they are; those that were named come first."""
    with shown(tmp_path / "runs", queue=tmp_path / "home" / "queue") as dashboard:
        assert keys(dashboard) == ["casa", "otra", "queue"]
        with dashboard.following("queue") as news:
            first = next(news)
            assert [(job["title"], job["state"], job["step"]) for job in first["jobs"]] == [
                ("casa", "waiting", 5),
                ("otra", "waiting", 5),
            ]
            hold_lock(RunDir(tmp_path / "home" / "queue"))
            queue.note(queue.find("otra"), "running", place="ana")
            second: dict[str, Any] = {}
            while not {"crew", "jobs", "head"} <= set(second):
                second |= next(news)
            assert second["head"]["state"] == "running"
            assert [(job["title"], job["state"]) for job in second["jobs"]] == [
                ("casa", "waiting"),
                ("otra", "running"),
            ]
            assert [(row["name"], row["job"]) for row in second["crew"]] == [("ana", "otra 5")]
        with dashboard.following("otra") as news:
            assert next(news)["head"]["version"] == 5


def test_without_a_queue(tmp_path: Path) -> None:
    WrittenCrew(folder=tmp_path / "runs" / "casa", speeds={"ana": 1.0}, rounds=2).write()
    with shown(tmp_path / "runs", queue=tmp_path / "home" / "queue") as dashboard:
        assert keys(dashboard) == ["casa"]
        assert dashboard.ask("/api/follow?of=queue")[0] == 404


def test_a_search_beside_its_run(tmp_path: Path) -> None:
    """Its trials are not in the list of runs, and each can be looked at."""
    WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 1.0}, rounds=2).write()
    search = WrittenSearch(run=tmp_path / "casa", num_trials=3).write()
    for place in (tmp_path / "casa", search.path):
        with shown(place) as dashboard:
            assert keys(dashboard)[-1] == "casa/tune"
            with dashboard.following("casa/tune") as news:
                first = next(news)
            assert [job["name"] for job in first["jobs"]] == [f"t000{number}" for number in range(3)]
            assert {job["state"] for job in first["jobs"]} == {"complete"}
            with dashboard.following("casa/tune/t0001") as news:
                assert next(news)["head"]["name"] == "t0001"
