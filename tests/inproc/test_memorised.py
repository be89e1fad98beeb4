"""A run that reads a little text too often: its best step is kept and used, and the run can end by itself."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from cuadrilla.cli.model import export_hf
from cuadrilla.crew.run import train_run
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.errors import CheckpointError
from cuadrilla.model.hf import load_hf
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.runfile import read_run_file
from cuadrilla.train.checkpoint import choose_step, list_checkpoints, version_of
from cuadrilla.train.runtime import Outcome
from cuadrilla.train.trained import load_trained, open_model, run_of
from tests.machines import language_run

STEPS = 150
OFTEN = ("sync.strict=false", "optim.lr=0.01", "evaluate.every_tokens=2560")


def train(run: RunDir, *sets: str) -> Outcome:
    return train_run(read_run_file(run.run_file, sets=[*OFTEN, *sets]), run)


def curve(run: RunDir) -> dict[int, float]:
    return {row["version"]: row["val_loss"] for row in last_rows(run.metrics) if "val_loss" in row}


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Read only."""
    folder = tmp_path_factory.mktemp("memorised")
    chance = random.Random(5)
    texts = ("".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=200)) for _ in range(12))
    (folder / "letters.txt").write_text("\n\n".join(texts), encoding="utf-8")  # only frequencies can be learnt
    options = PrepareOptions(vocab=260, keep_all=True, val_fraction=0.3)
    prepare([str(folder / "letters.txt")], out=folder / "text", options=options)
    run = language_run(folder / "run", folder / "text", steps=STEPS)
    outcome = train(run)
    assert (outcome.complete, outcome.version) == (True, STEPS)
    return run


@pytest.fixture
def copy(memorised: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(memorised.path, tmp_path / "run")
    shutil.copytree(memorised.path.parent / "text", tmp_path / "text")
    return RunDir(tmp_path / "run")


def test_the_step_of_the_lowest_held_out_loss_is_what_is_used(memorised: RunDir, tmp_path: Path) -> None:
    found = curve(memorised)
    best = min(found, key=found.__getitem__)
    assert best < STEPS
    weights = read_tensors(memorised.checkpoints / f"v{best:08d}" / WEIGHTS)
    chosen, newest = choose_step(memorised), choose_step(memorised, newest=True)
    assert (chosen.version, chosen.newest, newest.version) == (best, STEPS, STEPS)
    assert str(chosen).startswith(f"step {best} (lowest held-out loss; the newest is {STEPS}")
    assert load_trained(memorised).step == chosen
    export_hf(memorised.path, to=tmp_path / "hf")
    state = load_hf(tmp_path / "hf").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert f"| steps | {best} |" in (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")


def test_a_checkpoint_that_is_named_is_used_and_no_other_in_its_place(copy: RunDir) -> None:
    best = choose_step(copy).version
    named = next(path for path in list_checkpoints(copy.checkpoints) if version_of(path) not in (best, STEPS))
    run = run_of(named)
    assert run is not None
    assert choose_step(run).path == choose_step(run, newest=True).path == named
    assert str(open_model(named).step) == f"step {version_of(named)}"
    (named / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        open_model(named)


def test_a_best_step_that_is_damaged_is_not_used(copy: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    best = choose_step(copy).version
    (copy.checkpoints / f"v{best:08d}" / "model.safetensors").write_bytes(b"")
    assert choose_step(copy).version == STEPS
    assert "the newest is used instead of the best one" in caplog.text


@pytest.mark.thorough
def test_patience_ends_a_run_and_more_of_it_goes_on(memorised: RunDir, tmp_path: Path) -> None:
    found = curve(memorised)
    versions = sorted(found)
    expected = next(
        version
        for index, version in enumerate(versions)
        if index >= 2 and min(versions[: index + 1], key=found.__getitem__) == versions[index - 2]
    )
    shutil.copytree(memorised.path.parent / "text", tmp_path / "text")
    run = language_run(tmp_path / "run", tmp_path / "text", steps=STEPS)
    outcome = train(run, "evaluate.patience=2")
    assert (outcome.version, outcome.complete, outcome.interrupted) == (expected, False, False)
    assert "2 evaluations ago" in outcome.reason
    assert choose_step(run).version == outcome.best
    assert train(run, "evaluate.patience=2").version == expected  # the same command makes no further step
    assert train(run, "evaluate.patience=0").version == STEPS
    assert curve(run) == found
