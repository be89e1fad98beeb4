"""Only the owner can read the files of a training, whatever the umask and wherever the run folder is."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.inside import cuadrilla

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes of files")


@pytest.fixture(autouse=True)
def everybody_may_read() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> set[str]:
    """The files that others could read if they could enter `folder`."""
    found = set()
    for path in folder.iterdir():
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            found |= {path.name} | (open_to_others(path) if path.is_dir() else set())
    return found


def test_a_training_in_a_folder_that_is_open(language: RunDir, tmp_path: Path) -> None:
    """The owner chooses the modes of the folder and of its run file; the other files are private."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    shutil.copy(language.run_file, run.run_file)
    shutil.copytree(language.path.parent / "data", tmp_path / "data")
    words = ("--set", "checkpoint.journal='on'", "--set", "sample.tokens=4", "--set", "evaluate.every_tokens=1")
    cuadrilla("train", run.path, *words, code=0)
    made = {path.name for path in run.path.iterdir()}
    assert made >= {"checkpoints", "journal", "logs", "tokenizer.json", "metrics.jsonl", "events.jsonl"}
    assert open_to_others(run.path) == {"run.toml"}


def test_run_folders_that_commands_make(language: RunDir, tmp_path: Path) -> None:
    assert cuadrilla("new", tmp_path / "new").returncode == 0
    assert cuadrilla("export", "hf", language.path, "--to", tmp_path / "hf").returncode == 0
    cuadrilla("import", tmp_path / "hf", "--to", tmp_path / "imported", code=0)
    assert open_to_others(tmp_path) >= {"hf"}  # an export is to be passed on
    assert not open_to_others(tmp_path) & {"new", "imported"}
