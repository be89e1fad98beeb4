"""The dashboard's answers about a queue and about searches: which there are, what their streams tell, who may ask."""

import json
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.jobs.queue import RunQueue
from cuadrilla.monitor.web import app
from cuadrilla.rundir import RunDir
from tests.dashboards import ShownDashboard, shown
from tests.searches import WrittenSearch
from tests.watched import WrittenCrew, hold_lock

pytestmark = pytest.mark.inproc

JOBS = "/api/jobs?of="


def runs_of(dashboard: ShownDashboard) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(dashboard.ask("/api/runs")[1])
    return told


def keys(rows: list[dict[str, Any]]) -> list[str]:
    return [row["key"] for row in rows]


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
        told = runs_of(dashboard)
        assert keys(told["runs"]) == ["casa", "otra"]
        assert told["queues"] == [{"key": "queue", "title": "", "running": False}]
        with dashboard.following("queue", path=JOBS) as news:
            first = next(news)
            assert [(job["key"], job["state"], job["step"]) for job in first["jobs"]] == [
                ("casa", "waiting", 5),
                ("otra", "waiting", 5),
            ]
            hold_lock(RunDir(tmp_path / "home" / "queue"))
            queue.note(queue.find("otra"), "running", place="ana")
            second: dict[str, Any] = {}
            while "crew" not in second or not second["head"]["running"]:
                second |= next(news)
            assert [(job["key"], job["state"]) for job in second["jobs"]] == [("casa", "waiting"), ("otra", "running")]
            assert [(row["name"], len(row["jobs"])) for row in second["crew"]] == [("ana", 1)]
        with dashboard.following("otra") as news:
            assert next(news)["head"]["version"] == 5


def test_without_a_queue(tmp_path: Path) -> None:
    WrittenCrew(folder=tmp_path / "runs" / "casa", speeds={"ana": 1.0}, rounds=2).write()
    with shown(tmp_path / "runs", queue=tmp_path / "home" / "queue") as dashboard:
        assert runs_of(dashboard)["queues"] == []
        assert dashboard.ask(JOBS + "queue")[0] == 404


def test_a_search_beside_its_run(tmp_path: Path) -> None:
    """Its trials are not in the list of runs, and each can be looked at."""
    WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 1.0}, rounds=2).write()
    search = WrittenSearch(run=tmp_path / "casa", num_trials=3, rungs=1).write()
    with shown(tmp_path / "casa") as dashboard:
        told = runs_of(dashboard)
        assert (keys(told["runs"]), keys(told["queues"])) == (["casa"], ["search casa"])
        with dashboard.following("search casa", path=JOBS) as news:
            first = next(news)
        assert (first["head"]["kind"], first["head"]["number"], first["head"]["ended"]) == ("search", 3, 3)
        assert [job["key"] for job in first["jobs"]] == [f"casa/t000{number}-r0" for number in range(3)]
        with dashboard.following("casa/t0001-r0") as news:
            assert next(news)["head"]["name"] == "t0001-r0"
    with shown(search.path) as dashboard:
        told = runs_of(dashboard)
        assert (set(keys(told["runs"])), keys(told["queues"])) == (
            {f"t000{number}-r0" for number in range(3)},
            ["search casa"],
        )
        with dashboard.following("search casa", path=JOBS) as news:
            assert {job["key"] for job in next(news)["jobs"]} == set(keys(told["runs"]))


@pytest.mark.parametrize(
    "key", ["", "casa", "search", "search ../casa", "search casa/tune", "../home/queue", "x" * 5000]
)
def test_only_what_was_found_is_read(tmp_path: Path, queue: RunQueue, key: str) -> None:
    with shown(tmp_path / "runs", queue=tmp_path / "home" / "queue") as dashboard:
        assert dashboard.ask(JOBS + key.replace(" ", "%20"))[0] == 404
        for run in ("casa/../casa", "casa/t0000-r0", "casa/t0000-r0/../../otra"):
            assert dashboard.ask(f"/api/follow?of={run}")[0] == 404


def test_who_is_refused(tmp_path: Path, queue: RunQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    with shown(tmp_path / "runs", queue=tmp_path / "home" / "queue") as dashboard:
        assert dashboard.ask(JOBS + "queue", Authorization="")[0] == 401
        assert dashboard.ask(JOBS + "queue", method="POST")[0] == 405
        monkeypatch.setattr(app, "MAX_STREAMS", 1)
        with dashboard.following("queue", path=JOBS) as news:
            next(news)
            assert dashboard.ask(JOBS + "queue")[0] == 503
            assert dashboard.ask("/api/follow?of=casa")[0] == 503
