"""The trials of a search, read from its files, and the machines that train them."""

from pathlib import Path

import pytest

from cuadrilla.monitor.jobs import open_run
from cuadrilla.rundir import FolderLock
from tests.searches import FAILS, WrittenSearch


def test_a_search(tmp_path: Path) -> None:
    search = WrittenSearch(run=tmp_path, num_trials=6).write(until=5)
    with FolderLock(search.lock, purpose="a test"):
        now = open_run(search.path).data(now=1e9)
    jobs = {job["name"]: job for job in now["jobs"]}
    assert [job["state"] for job in jobs.values()] == ["complete"] * 3 + ["failed", "complete", "running"]
    assert jobs[f"t000{FAILS}"]["reason"] == "the loss is not finite"
    assert jobs["t0000"]["score"] == pytest.approx(4, abs=3)
    assert "optim.lr=0.0" in jobs["t0000"]["values"]
    assert [(each["name"], each["job"]) for each in now["machines"]] == [("place-1", "t0005")]
    assert open_run(search.path).data(now=1e9)["jobs"][-1]["state"] == "waiting"
