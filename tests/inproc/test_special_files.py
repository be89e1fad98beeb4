"""Files of others: a pipe instead of one, or one that takes all memory, is refused."""

import json
import os
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from cuadrilla.rundir import RunDir
from tests.inside import cuadrilla
from tests.models import language_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: pipes as files"),
    pytest.mark.timeout(60, method="signal", func_only=True),  # a pipe is waited for without end
]


def put(path: Path) -> None:
    """A pipe instead of what is there."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, trained on `data`, and `hf`, what it was exported as."""
    folder = tmp_path_factory.mktemp("made")
    run = language_run(folder)
    assert cuadrilla("export", "hf", run.path, "--to", folder / "hf").returncode == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "here")


def refuses(done: "CompletedProcess[str]", *, code: int, naming: str) -> None:
    assert done.returncode == code, done.stderr
    assert naming in done.stderr.partition("hint:")[0]
    assert done.stderr.partition("hint:")[2].strip()
    assert "Traceback" not in done.stderr


IMPORT = ("import", "hf", "--to", "new")
EVAL = ("eval", "run", "--device", "cpu")


@pytest.mark.parametrize(
    ("place", "command", "code"),
    [
        ("hf/model.safetensors", IMPORT, 6),
        ("hf/config.json", IMPORT, 6),
        ("hf/tokenizer.json", IMPORT, 4),
        ("hf", ("generate", "hf"), 2),
        ("thing.txt", (*EVAL, "--text", "thing.txt"), 4),
        ("thing.txt", ("data", "prepare", "thing.txt", "--out", "out"), 4),
        ("thing.json", ("data", "prepare", "cuentos:200", "--out", "out", "--tokenizer", "thing.json"), 4),
        ("data/manifest.json", ("data", "stats", "data"), 4),
        ("run/metrics.jsonl", ("dashboard", "run", "--save", "page.html"), 2),
        ("run/run.toml", ("train", "run"), 2),
        ("run/config.json", ("generate", "run"), 2),
    ],
)
def test_what_is_no_file(here: Path, place: str, command: tuple[str, ...], code: int) -> None:
    if (here / place).is_dir():
        shutil.rmtree(here / place)
    put(here / place)
    done = cuadrilla(*command, cwd=here)
    assert done.returncode == code, done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (here / "new").exists()
    assert not (here / "out").exists()


def test_what_is_left_out(here: Path) -> None:
    """Of a model its card, of a run's page what it can do without."""
    put(here / "hf" / "README.md")
    done = cuadrilla("import", here / "hf", "--to", here / "new")
    assert done.returncode == 0, done.stderr
    run = RunDir(here / "run")
    for path in (run.config, run.env, run.status, run.events, here / "data" / "manifest.json"):
        put(path)
    done = cuadrilla("dashboard", run.path, "--save", here / "page.html")
    assert done.returncode == 0, done.stderr
    assert (here / "page.html").stat().st_size > 1000


def test_a_tokenizer_that_takes_all_memory(here: Path) -> None:
    """Sixteen steps that each write four letters for one make 4 GiB of one letter, when a token is normalised."""
    path = here / "hf" / "tokenizer.json"
    value = json.loads(path.read_bytes())
    fourfold = {"type": "Replace", "pattern": {"String": "q"}, "content": "qqqq"}
    value["normalizer"] = {"type": "Sequence", "normalizers": [fourfold] * 16}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    value["added_tokens"].append({"id": len(value["model"]["vocab"]), "content": "q", **flags})
    path.write_text(json.dumps(value))
    done = cuadrilla("import", here / "hf", "--to", here / "new")
    refuses(done, code=4, naming="loses or changes text")


@pytest.mark.parametrize(
    ("name", "num_bytes", "code", "told"),
    [
        ("model.safetensors", 2**43, 6, "8,192.0 GiB of weights, this machine a memory of"),
        ("config.json", 2**20 + 1, 6, f"config.json: more than {2**20:,} bytes"),
        ("tokenizer.json", 2**26 + 1, 4, f"tokenizer.json: more than {2**26:,} bytes"),
    ],
)
def test_a_large_file_is_not_opened(here: Path, name: str, num_bytes: int, code: int, told: str) -> None:
    """It takes no room on the disk, and would take all memory."""
    with open(here / "hf" / name, "r+b") as file:
        file.truncate(num_bytes)
    refuses(cuadrilla("import", here / "hf", "--to", here / "new"), code=code, naming=told)
