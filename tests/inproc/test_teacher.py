"""A model that learns from a text and from a teacher: the same bits for any crew, and wherever the teacher is moved."""

import shutil
from pathlib import Path

import pytest
import torch

from cuadrilla.cli.evaluate import evaluate
from cuadrilla.crew import bundle
from cuadrilla.crew.run import train_run
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.errors import CheckpointError, ConfigError, DataError
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.runfile import read_run_file
from cuadrilla.train.checkpoint import choose_step
from tests.machines import language_run
from tests.runs import final

TEACHER = 'train.teacher="../teacher"'


@pytest.fixture
def teacher(stories: Path, tmp_path: Path) -> RunDir:
    run = language_run(tmp_path / "teacher", stories, steps=12)
    train(run, "optim.lr=0.01")
    return run


CREW = ('engine.kind="crew"', "engine.workers=[1.0, 0.5]")


def train(run: RunDir, *sets: str, stop_at: int = 0) -> None:
    train_run(read_run_file(run.run_file, sets=sets), run, stop_at=stop_at)


def losses(run: RunDir) -> list[float]:
    return [row["loss"] for row in last_rows(run.metrics)]


def same(a: RunDir, b: RunDir) -> bool:
    one, two = final(a.path), final(b.path)
    return all(torch.equal(one[name], two[name]) for name in one)


def test_a_crew_gives_what_one_gives_and_the_teacher_may_go_away(
    stories: Path, teacher: RunDir, tmp_path: Path
) -> None:
    alone = language_run(tmp_path / "alone", stories, steps=6)
    train(alone, TEACHER)
    untaught = language_run(tmp_path / "untaught", stories, steps=6)
    train(untaught)
    assert not same(alone, untaught)
    crew = language_run(tmp_path / "crew", stories, steps=6)
    train(crew, TEACHER, *CREW, stop_at=3)
    assert {path.name for path in (crew.teachers / "0").iterdir()} >= {"config.json", "model.safetensors"}
    shutil.rmtree(teacher.path)
    train(crew, TEACHER, *CREW)  # the copy is kept
    assert same(alone, crew)
    assert losses(crew) == losses(alone)
    files = bundle.offer(read_run_file(crew.run_file).config, crew.path).files
    assert {"teachers/0/config.json", "teachers/0/model.safetensors"} < set(files)
    assert all(bundle.FILE.fullmatch(name) for name in files)


def test_its_text_loss_is_what_is_reported_and_several_teachers_are_averaged(
    stories: Path, teacher: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two copies of a teacher teach like one. The reported loss is that of the text alone."""
    one, two = (language_run(tmp_path / name, stories, steps=4) for name in ("one", "two"))
    train(one, TEACHER, "evaluate.sequences=10_000")  # all of them, as afterwards
    train(two, 'train.teacher=["../teacher", "../teacher"]')
    assert losses(one) == pytest.approx(losses(two), rel=1e-6)
    rows = [row for row in last_rows(one.metrics) if "val_loss" in row]
    best = min(rows, key=lambda row: row["val_loss"])
    capsys.readouterr()
    evaluate([one.path], device="cpu")
    assert f"{best['val_bits_per_byte']:.4f}" in capsys.readouterr().out
    assert choose_step(one).newest == 4


def test_who_cannot_teach_is_refused(stories: Path, teacher: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "other"
    prepare(["cuentos:60"], out=other, options=PrepareOptions(vocab=290))
    run = language_run(tmp_path / "run", other, steps=4)
    with pytest.raises(DataError, match="the tokenizer of the teacher"):
        train(run, TEACHER)
    with pytest.raises(ConfigError, match=r"nobody does not exist"):
        train(run, 'train.teacher="../nobody"')
    longer = language_run(tmp_path / "longer", stories, steps=4)
    with pytest.raises(DataError, match=r"a shorter context \(32\)"):
        train(longer, TEACHER, "model.context=64")
    assert not longer.teachers.exists()
    assert not list(longer.path.glob(".teachers*"))


def test_a_teacher_belongs_to_the_run(stories: Path, teacher: RunDir, tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", stories, steps=4)
    train(run, TEACHER, stop_at=2)
    with pytest.raises(ConfigError, match=r"train.teacher"):
        train(run)
    weights = run.teachers / "0" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-4] + b"\0\0\0\1")
    with pytest.raises(CheckpointError, match="or a teacher, is not"):
        train(run, TEACHER)
    weights.unlink()
    with pytest.raises(DataError, match="cannot read the teacher"):
        train(run, TEACHER)
    weights.write_bytes(kept)
    train(run, TEACHER)
    assert choose_step(run).newest == 4
