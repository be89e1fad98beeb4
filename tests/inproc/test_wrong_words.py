"""Arguments that make no sense: the command says in two lines what is wrong and what to type, and changes nothing."""

import os
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.commands import make_run
from tests.inside import cuadrilla

HERE = "mio"
NOBODY = "no coordinator runs on this machine"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "libros").mkdir()
    (tmp_path / "libros" / "uno.txt").write_text("\n\n".join(f"Una frase, la número {n}." for n in range(200)))
    return make_run(tmp_path / HERE)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("nonsense", 2, "nonsense"),
        ("train --nonsense", 2, "nonsense"),
        ("train nowhere/run.toml", 2, "cannot read"),
        ("train nada", 2, "nada"),
        ("train libros/uno.txt nada.txt", 2, "nada.txt is no text"),
        ("train libros/uno.txt --time soon", 2, "is not a time"),
        ("train libros/uno.txt --preset gpt2-huge", 2, "should be one of 'gpt2-micro'"),
        ("train mio --practice 1.0,", 2, "is not a list of speeds"),
        ("train mio --practice 0", 2, "engine.workers"),
        ("train mio --practice 1@100", 2, "engine.link"),
        ("new x --preset huge", 2, "should be one of 'gpt2-micro'"),
        ("prove mio --crew fast", 2, "--crew fast: 'fast' is not a list of speeds"),
        ("prove mio --set train.unit_sequences=64", 2, "is a single unit of work"),
        ("plan mio --crew nadie", 2, "classroom-30"),
        ("queue", 2, "cannot read queue.txt"),
        ("help kick", 0, "Remove a machine"),
        ("help kick", 0, "With every command: --json"),
        ("doctor --lang=xx", 2, "hint: --lang en, or --lang es"),
        ("doctor --lang", 2, "unknown language ''"),
        ("data nada", 2, "No such command 'nada'"),
        ("data nada --lang es", 2, "No existe la orden 'nada'"),
        ("invite", 5, NOBODY),
        ("stop", 5, NOBODY),
        ("join --forget", 5, "has not joined that crew"),
        ("join --trust abc", 2, "is not a hash of code"),
        ("join --invite-file nowhere.txt", 2, "nowhere.txt does not exist"),
        ("promote", 5, "has not joined a crew"),
        ("kick nadie", 5, "no node is named"),
        ("up nowhere", 2, "cannot read"),
        ("tune nowhere", 2, "cannot read"),
        ("data prepare libros --out otro --vocab 256", 2, ""),
        ("data prepare libros --out otro --val-fraction 0.9", 2, ""),
        ("data prepare libros --out otro --tokenizer missing.json", 4, ""),
        ("data prepare libros --out otro --processes 0", 2, ""),
    ],
)
def test_what_cannot_be_meant(run: RunDir, words: str, code: int, message: str) -> None:
    home = run.path.parent
    done = cuadrilla(*words.split(), cwd=home, env={**os.environ, "CUADRILLA_HOME": str(home / "home")})
    assert (done.returncode, message in done.stderr + done.stdout) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in home.iterdir()} <= {HERE, "libros", "home"}
    assert {path.name for path in run.path.iterdir()} <= {"run.toml", "task.py", "__pycache__"}
