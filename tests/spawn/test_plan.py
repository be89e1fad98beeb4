"""`cuadrilla plan` on a small run, as it is typed."""

import json
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.commands import cuadrilla, make_run

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
    done = cuadrilla("plan", str(run.path), "--crew", str(file), "--json")
    assert done.returncode == 0, done.stderr
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
    done = cuadrilla("plan", str(run.path), *sets)
    assert done.returncode == 0, done.stderr
    assert "train alone on worker-1" in done.stdout
    assert "the best alone" in done.stdout


def test_a_crew_that_cannot_be_read(run: RunDir) -> None:
    done = cuadrilla("plan", str(run.path), "--crew", "nadie")
    assert done.returncode == 2
    assert "classroom-30" in done.stderr
