"""The runs of a queue and the trials of a search, read from their files, and the machines that train them."""

from pathlib import Path
from typing import Any

import pytest

from cuadrilla.jobs.queue import RunQueue
from cuadrilla.monitor.jobs import open_run
from cuadrilla.rundir import FolderLock, RunDir, append_event, write_json
from tests.searches import FAILS, WrittenSearch
from tests.watched import add_rows


def step(version: int, **more: object) -> dict[str, object]:
    return {"version": version, "tokens": 100 * version, "loss": 3.0 - version / 1000, **more}


@pytest.fixture
def queue(tmp_path: Path) -> RunQueue:
    queue = RunQueue(tmp_path / "queue")
    for name in ("uno", "dos", "tres"):
        (tmp_path / name).mkdir()
        queue.add(RunDir(tmp_path / name), on=("ana", "cpu"))
    return queue


def read(folder: Path) -> dict[str, Any]:
    return open_run(folder, queue=folder).data(now=1e9)


def test_a_queue(tmp_path: Path, queue: RunQueue) -> None:
    uno, dos = queue.find("uno"), queue.find("dos")
    add_rows(uno.run.metrics, [step(1), step(2, val_bits_per_byte=1.5), step(3)])
    write_json(uno.run.config, {"num_steps": 10})
    queue.note(uno, "running", place="luis/cuda:0")
    queue.note(dos, "failed", place="ana", reason="the disk is full")
    queue.put_first(queue.find("tres"))
    append_event(tmp_path / "queue" / "events.jsonl", "joined", worker="ana")
    with FolderLock(tmp_path / "queue" / "lock", purpose="a test"):
        now = read(tmp_path / "queue")
    tres, uno_now, dos_now = now["jobs"]
    assert (tres["title"], tres["state"], tres["machine"], tres["step"]) == ("tres", "waiting", "ana, cpu", None)
    assert (uno_now["state"], uno_now["machine"]) == ("running", "luis/cuda:0")
    assert [uno_now[key] for key in ("step", "steps", "loss", "val_bits_per_byte")] == [3, 10, 2.997, 1.5]
    assert [dos_now[key] for key in ("state", "machine", "reason")] == ["failed", "ana", "the disk is full"]
    machines = [(each["name"], each["here"], each["job"], each["share"]) for each in now["machines"]]
    assert machines == [("ana", True, "", None), ("luis/cuda:0", True, "uno 3/10", None)]
    ended = read(tmp_path / "queue")  # no process hands out runs any more, so no machine has one
    assert [job["state"] for job in ended["jobs"]] == ["waiting", "waiting", "failed"]


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
