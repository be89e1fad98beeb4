"""`cuadrilla plan` on a small run, as a user types it."""

import itertools
import json
from pathlib import Path

import pytest

from cuadrilla.config import ExactSync
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.runfile import read_run_config
from tests.commands import cuadrilla, make_run

pytestmark = pytest.mark.usefixtures("measured_soon")

CREW = """
link = "100mbit"
[[machine]]
name = "this one"
speed = 1.0
[[machine]]
name = "the other"
speed = 2.0
link = "100mbit+1ms"
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "cuadrilla ñ", steps=1000)


def test_a_described_crew(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "casa.toml"
    file.write_text(CREW)
    done = cuadrilla("plan", str(run.path), "--crew", str(file), "--json", code=0)
    found = json.loads(done.stdout)
    rates = [machine["tokens_per_second"] for machine in found["machines"]]
    assert rates == [pytest.approx(found["measured"]["tokens_per_second"]), pytest.approx(2 * rates[0])]
    assert found["ceiling"] == pytest.approx(1.5)
    gains = [each["gain"] for each in found["predictions"]]
    assert gains == sorted(gains, reverse=True)
    assert 1.0 in gains
    assert found["seconds"] > 0
    assert not (run.path / "checkpoints").exists()


def test_the_practice_crew_of_the_run_file_in_words(run: RunDir) -> None:
    sets = ("--set", "engine.kind=crew", "--set", "engine.workers=[1.0, 0.5]", "--set", 'engine.link="1kbit"')
    done = cuadrilla("plan", str(run.path), *sets, code=0)
    assert "train alone on worker-1" in done.stdout
    assert "the best alone" in done.stdout


def test_auto_takes_to_windows_on_a_slow_line(run: RunDir) -> None:
    done = cuadrilla("train", str(run.path), "--practice", "1.0,0.5@2mbit", "--set", "train.steps=60", code=0)
    assert "after several where that is faster" in done.stderr
    assert "by itself before a merge" in done.stderr
    rows = list(read_jsonl(run.metrics))
    assert rows[0].get("steps", 1) == 1
    assert max(row.get("steps", 1) for row in rows) > 1
    assert [row["version"] for row in rows] == list(itertools.accumulate(row.get("steps", 1) for row in rows))
    assert rows[-1]["version"] == 60
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_auto_is_exact_in_one_process(run: RunDir) -> None:
    cuadrilla("train", str(run.path), "--stop-at", "1", code=0)
    assert read_run_config(run).sync == ExactSync()
