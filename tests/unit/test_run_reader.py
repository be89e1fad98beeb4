"""The state of a run, read from its directory: which machines are there, what each does, and how the run ended."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.host.usage import Usage
from cuadrilla.link.base import NodeReport, SaidLine
from cuadrilla.monitor.run import MAX_HISTORY, RunReader, open_run, state_of
from cuadrilla.rundir import FolderLock, RunDir, append_event, write_json
from cuadrilla.train import nodelog
from cuadrilla.train.nodelog import NodeLogs
from tests.watched import add_rows

START = 1_795_569_000.0
SHARES = {"pc": 0.75, "mac": 0.25}


def step(version: int, **more: object) -> dict[str, object]:
    row = {"version": version, "tokens": 1000 * version, "loss": 3.0, "workers": 2, "tokens_per_second": 400.0}
    return {**row, "shares": SHARES, **more}


def came(event: str, worker: str, at: float, **more: object) -> dict[str, object]:
    return {"time": START + at, "event": event, "worker": worker, **more}


def some(row: dict[str, Any], *keys: str) -> tuple[Any, ...]:
    return tuple(row[key] for key in keys)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two machines at work, one that has left, and one that took part before the run was stopped and resumed."""
    run = RunDir(tmp_path / "mío")
    run.path.mkdir()
    before = [came("joined", "luis", 0), {"time": START, "event": "finished"}]
    joined = [came("joined", name, 1) for name in ("pc", "mac", "old")]
    add_rows(run.events, [*before, *joined, came("left", "old", 50, reason="the connection ended")])
    add_rows(run.metrics, [step(version) for version in range(1, 41)])
    add_rows(run.metrics, [step(40, val_bits_per_byte=1.25)])  # a later row of a step wins
    logs = NodeLogs(run.nodes, clock=lambda: START + 60)
    for name, lines in {"coordinator": (), "pc": (SaidLine(level="error", text="nan"),), "old": ()}.items():
        usage, facts = Usage(cpu_percent=50.0), {"device": "cpu"}
        logs.report(name, NodeReport(usage=usage, phase="computing", lines=lines, facts=facts))
    write_json(run.status, {"state": "running", "version": 40})
    return run


def test_a_run_that_trains(run: RunDir) -> None:
    with FolderLock(run.lock):
        crew = RunReader(run).data(now=START + 63)
    assert some(crew, "name", "state", "version", "tokens", "loss") == ("mío", "running", 40, 40_000, 3.0)
    assert some(crew, "val_bits_per_byte", "tokens_per_second", "seen") == (1.25, 400.0, START + 60)
    coordinator, mac, pc, luis, old = crew["machines"]
    assert [machine["name"] for machine in crew["machines"]] == ["coordinator", "mac", "pc", "luis", "old"]
    assert [machine["here"] for machine in crew["machines"]] == [True, True, True, False, False]
    assert some(luis, "joined", "lost", "seen") == (1, 0, START)
    assert some(pc, "share", "tokens_per_second", "phase") == (0.75, pytest.approx(300), "computing")
    assert some(pc, "usage", "facts") == ({"cpu_percent": 50.0}, {"device": "cpu"})
    assert some(pc, "word", "seen") == ({"time": START + 60, "level": "error", "text": "nan"}, START + 60)
    assert some(mac, "share", "seen", "word") == (0.25, None, None)  # its report has not come yet
    assert some(coordinator, "share", "seen") == (None, START + 60)
    word = {"time": START + 50, "level": "warning", "text": "the connection ended"}
    assert some(old, "share", "word") == (None, word)


def test_the_reader_goes_on_where_it_stopped(run: RunDir) -> None:
    with FolderLock(run.lock):
        reader = RunReader(run)
        reader.data(now=START)
        add_rows(run.events, [came("joined", "old", 70), came("evicted", "mac", 71, reason="three wrong answers")])
        add_rows(run.metrics, [step(version, shares={"old": 1.0}, loss=2.0) for version in range(41, 71)])
        add_rows(run.metrics, [step(45, val_loss=2.0, val_bits_per_byte=1.5)])  # an evaluation that took long
        crew = reader.data(now=START + 80)
    by_name = {machine["name"]: machine for machine in crew["machines"]}
    assert {name for name, machine in by_name.items() if machine["here"]} == {"coordinator", "pc", "old"}
    assert [by_name[name]["share"] for name in ("old", "pc", "mac")] == [1.0, 0.0, None]
    assert some(by_name["old"], "joined", "lost", "reason") == (2, 1, "the connection ended")
    assert by_name["mac"]["word"] == {"time": START + 71, "level": "warning", "text": "three wrong answers"}
    assert some(crew, "version", "loss", "val_bits_per_byte") == (70, 2.0, 1.5)


def test_a_run_that_has_ended_shows_what_was(run: RunDir) -> None:
    append_event(run.events, "left", worker="pc", reason="paused")
    append_event(run.events, "joined", worker="pc")
    append_event(run.events, "finished", version=40, complete=True)
    write_json(run.status, {"state": "complete", "version": 40})
    crew = RunReader(run).data(now=START + 10**7)
    assert crew["state"] == "complete"
    assert not any(machine["here"] for machine in crew["machines"])
    by_name = {machine["name"]: machine for machine in crew["machines"]}
    assert (by_name["pc"]["share"], by_name["old"]["share"]) == (0.75, None)
    assert by_name["mac"]["seen"] is not None  # it was there until the end
    assert by_name["pc"]["usage"]["cpu_percent"] == 50.0
    assert (by_name["pc"]["lost"], by_name["pc"]["reason"]) == (1, "")


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (None, "waiting"),
        ("running", "stopped"),  # its process is gone
        ("complete", "complete"),
        ("failed", "failed"),
    ],
)
def test_the_state(tmp_path: Path, status: object, state: str) -> None:
    run = RunDir(tmp_path)
    if status is not None:
        run.status.write_text(json.dumps({"state": status}))
    assert state_of(run) == state
    run.lock.write_text(json.dumps({"pid": os.getppid(), "host": os.uname().nodename}))
    assert state_of(run) == state  # no process holds its lock, whatever its status says
    with FolderLock(run.lock):
        assert state_of(run) == "running"


def test_where_no_run_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run"):
        open_run(tmp_path)
    (tmp_path / "run.toml").write_text("schema = 1\n")
    crew = open_run(tmp_path).data(now=START)
    assert (crew["state"], crew["machines"], "version" in crew) == ("waiting", [], False)


def test_what_machines_do_for_a_queue(tmp_path: Path) -> None:
    """Each does one job after the other, until it leaves."""
    run = RunDir(tmp_path)
    rows = [came("joined", name, 0) for name in ("ana", "eva", "luis")]
    rows += [came("assigned", name, 1, job=job) for name, job in (("ana", "uno"), ("eva", "dos"), ("luis", "tres"))]
    add_rows(run.events, [*rows, came("left", "luis", 2), came("returned", "luis", 2, job="tres", state="stopped")])
    add_rows(
        run.events, [came("returned", "ana", 3, job="uno", state="complete"), came("assigned", "ana", 3, job="tres")]
    )
    add_rows(run.events, [came("returned", "eva", 4, job="dos", state="failed")])
    with FolderLock(run.lock):
        machines = open_run(run.path).data(now=START)["machines"]
    assert [some(each, "name", "job", "here") for each in machines] == [
        ("ana", "tres", True),
        ("eva", "", True),
        ("luis", "", False),
    ]


def test_a_machine_s_file_that_was_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description of a machine is at the head of its file; of its reports only the end of the file is read."""
    monkeypatch.setattr(nodelog, "MAX_BYTES", 10_000)
    run, at = RunDir(tmp_path), iter(range(10**6))
    logs = NodeLogs(run.nodes, clock=lambda: START + next(at))
    report = NodeReport(usage=Usage(cpu_percent=50.0), waiting_part=0.25, round_trip_seconds=0.1)
    logs.report("pc/cuda:0", NodeReport(facts={"device": "cuda"}))
    reader = RunReader(run)
    reader.page()
    for _ in range(400):
        logs.report("pc/cuda:0", report)
        reader.data(now=START)
    for each in (reader, RunReader(run)):
        (machine,) = each.data(now=START)["machines"]
        assert some(machine, "name", "facts", "waiting_part") == ("pc/cuda:0", {"device": "cuda"}, 0.25)
        assert machine["usage"] == {"cpu_percent": 50.0}
    points = reader.page()["points"]["pc/cuda:0"]
    assert len(points) == MAX_HISTORY
    assert points[-1] == [START + 400, 0.5, None, 0.25]
