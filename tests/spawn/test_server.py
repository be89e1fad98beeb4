"""The asynchronous strategy in real processes: a practice crew, what is said about it, and what it cannot prove."""

from pathlib import Path

import pytest

from cuadrilla.rundir import last_rows
from tests.commands import make_run, train
from tests.inside import cuadrilla

SERVER = ("--set", "sync.kind=server")


def notes(said: str) -> list[str]:
    """The settings that a note is about."""
    return [line.split()[1].rstrip(":") for line in said.splitlines() if line.startswith("note ")]


@pytest.mark.thorough
def test_a_practice_crew_trains_asynchronously(tmp_path: Path) -> None:
    run = make_run(tmp_path / "cuadrilla ñ", steps=120)
    done = train(run, *SERVER, "--set", "sync.staleness=1", "--practice", "1.0,0.5,0.25")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert notes(done.stderr) == ["sync.staleness", "optim.kind"]
    rows = last_rows(run.metrics)
    assert [row["version"] for row in rows] == list(range(1, 121))
    assert max(row["staleness"] for row in rows) <= 1


def test_alone_or_with_delayed_momentum_there_is_nothing_to_note(tmp_path: Path) -> None:
    run = make_run(tmp_path / "alone", steps=3)
    assert notes(train(run, *SERVER).stderr) == []
    delayed = ("--set", "optim.kind=nesterov", "--set", "optim.delay=2", "--set", "engine.workers=[1.0,1.0]")
    other = make_run(tmp_path / "delayed", steps=3)
    done = train(other, *SERVER, *delayed)
    assert done.returncode == 0, done.stderr
    assert notes(done.stderr) == []


def test_it_is_nothing_to_prove(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    done = cuadrilla("prove", str(run.run_file), *SERVER, "--crew", "1.0,0.5")
    assert done.returncode == 2, done.stderr
    assert "does not promise" in done.stderr
    assert "strict" not in done.stderr
