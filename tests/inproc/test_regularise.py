"""The weight decay that nobody has set: by how often the text is read, said, kept by the run; a setting holds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cuadrilla
from cuadrilla.plan.regularise import weight_decay
from cuadrilla.rundir import RunDir, write_json
from cuadrilla.train.checkpoint import load_newest
from tests.inside import cuadrilla as command
from tests.runs import execute
from tests.tasks import Normalised

SETTINGS: Mapping[str, Any] = {
    "data": {"folder": "../data"},
    "model": {"layers": 1, "heads": 1, "width": 16, "context": 64},
    "train": {"epochs": 2.0, "batch_sequences": 8, "unit_sequences": 8, "threads": 1, "precision": "fp32"},
    "evaluate": {"sequences": 4},
    "sample": {"tokens": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("regularised")
    cuadrilla.prepare(["cuentos:60"], out=made / "data", options=cuadrilla.PrepareOptions(vocab=400))
    return made


def decay_of(run: RunDir) -> float:
    """What the optimizer of its newest checkpoint was made with."""
    found = load_newest(run.checkpoints)
    assert found is not None
    decay = json.loads(run.config.read_text())["values"]["optim"]["weight_decay"]
    assert found.state["identity"]["config"]["optim"]["weight_decay"] == decay
    return float(decay)


def test_the_rule() -> None:
    assert [weight_decay(epochs) for epochs in (0.5, 1.99, 2.0, 5.9, 6.0, 16)] == [0, 0, 0.1, 0.1, 0.3, 0.3]


def test_a_text_that_is_read_twice_is_held_back_and_the_run_keeps_it(folder: Path) -> None:
    cuadrilla.new_run(folder / "twice", SETTINGS)
    run, path = RunDir(folder / "twice"), str(folder / "twice")
    shown = command("config", "show", path)
    assert ["optim.weight_decay", "0.1", "read", "2.0", "times"] in [line.split() for line in shown.stdout.splitlines()]
    done = command("train", path, "--stop-at", "3")
    assert "note       optim.weight_decay: 0.1, as each sequence is read 2.0 times" in done.stderr
    assert decay_of(run) == 0.1
    done = command("train", path, "--stop-at", "5", "--set", "train.epochs=1.5", "--allow-changes")
    assert "changed" not in done.stderr
    assert decay_of(run) == 0.1  # as it began


@pytest.mark.parametrize(
    ("name", "settings", "decay"),
    [
        ("once", {"train.epochs": 1.0}, 0.0),
        ("steps", {"train.epochs": 0.0, "train.steps": 10_000, "train.batch_sequences": 16}, 0.3),
        ("none", {"optim.weight_decay": 0.0}, 0.0),
        ("much", {"optim.weight_decay": 1.0}, 1.0),
        ("adamw", {"optim.kind": "adamw"}, 0.1),
    ],
)
def test_what_is_set_holds(folder: Path, name: str, settings: Mapping[str, Any], decay: float) -> None:
    run = cuadrilla.new_run(folder / name, SETTINGS)
    run.train(settings, stop_at=2)
    assert decay_of(RunDir(folder / name)) == decay


def test_a_run_of_before_the_rule_goes_on_as_it_began(folder: Path) -> None:
    run, path = cuadrilla.new_run(folder / "old", SETTINGS), RunDir(folder / "old")
    run.train({"optim.weight_decay": 0.0}, stop_at=2)
    written = json.loads(path.config.read_text())
    write_json(path.config, {**written, "origins": {**written["origins"], "optim.weight_decay": "default"}})
    run.train(stop_at=4)
    assert decay_of(path) == 0.0


def test_a_task_of_one_s_own_has_no_rule(tmp_path: Path) -> None:
    execute(tmp_path, Normalised(), "optim.kind=muon", "train.steps=3")
    found = load_newest(RunDir(tmp_path).checkpoints)
    assert found is not None
    assert found.state["identity"]["config"]["optim"]["weight_decay"] == 0.0
