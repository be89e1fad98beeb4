"""Models of others that would take all memory are refused."""

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.inside import cuadrilla
from tests.models import language_run


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


def test_a_file_of_weights_longer_than_it_says_is_refused_unread(here: Path) -> None:
    """Eight terabytes of nothing, which take no room on the disk."""
    with open(here / "hf" / "model.safetensors", "r+b") as file:
        file.truncate(2**43)
    done = cuadrilla("import", here / "hf", "--to", here / "new")
    refuses(done, code=6, naming="is not a complete safetensors file")
