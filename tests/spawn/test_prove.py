"""`cuadrilla prove` on a small run: the same bits, other bits, Ctrl-C; nothing is left behind."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.commands import COMMAND, TASK, make_run

CREW = ("--crew", "1.0,0.5", "--steps", "6")
OTHER_MODEL_IN_A_CREW = TASK.replace(
    ".square().sum()", '.square().sum() * (1.0 + 1e-6 * ("work" in __import__("sys").argv))'
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "cuadrilla ñ", steps=1000)


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def prove(run: RunDir, temporary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment, command = {**os.environ, "TMPDIR": str(temporary)}, [*COMMAND, "prove", str(run.path), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


def untouched(run: RunDir, temporary: Path) -> bool:
    left = [path.name for path in temporary.iterdir() if path.name.startswith("cuadrilla")]
    kept = {path.name for path in run.path.iterdir()} - {"__pycache__"}
    return not left and kept == {"run.toml", "task.py"}


def test_the_same_bits(run: RunDir, temporary: Path) -> None:
    done = prove(run, temporary, *CREW, "--json")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["sha256_one"] == result["sha256_crew"]
    assert result["differing"] == []
    assert untouched(run, temporary)


@pytest.mark.thorough
def test_other_bits_are_named(run: RunDir, temporary: Path) -> None:
    """A model whose loss is a millionth larger in worker processes."""
    (run.path / "task.py").write_text(OTHER_MODEL_IN_A_CREW)
    done = prove(run, temporary, *CREW)
    assert done.returncode == 7, done.stderr
    assert "the crew's bits are not those of one worker: " in done.stderr
    assert "tensors differ, such as 0.bias" in done.stderr
    assert "hint:" in done.stderr
    assert "Equal" not in done.stdout
    assert untouched(run, temporary)
