"""Files of others: a pipe, a device, a socket or a folder instead of one, or one that takes all memory, is refused."""

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from cuadrilla.rundir import RunDir
from tests.inside import cuadrilla
from tests.models import language_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: pipes, devices and sockets as files"),
    pytest.mark.timeout(60, method="signal", func_only=True),  # a pipe is waited for without end
]

KINDS = ("pipe", "device", "socket", "folder")
Place = Callable[[Path], None]


@pytest.fixture(params=KINDS)
def put(request: pytest.FixtureRequest) -> Place:
    """Put something at a path that is no file, instead of what is there."""

    def put(path: Path) -> None:
        path.unlink(missing_ok=True)
        match request.param:
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
            case "socket":
                os.mknod(path, stat.S_IFSOCK | 0o600)
            case "folder":
                path.mkdir()

    return put


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


@pytest.mark.parametrize(
    ("name", "code"),
    [("model.safetensors", 6), ("model.safetensors.index.json", 6), ("config.json", 6), ("tokenizer.json", 4)],
)
def test_a_model_with_such_a_member(here: Path, put: Place, name: str, code: int) -> None:
    if name.endswith(".index.json"):
        (here / "hf" / "model.safetensors").unlink()
    put(here / "hf" / name)
    refuses(cuadrilla("import", here / "hf", "--to", here / "new"), code=code, naming=name)
    assert not (here / "new").exists()


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "added_tokens.json"])
def test_a_tokenizer_in_parts_with_such_a_part(here: Path, put: Place, name: str) -> None:
    (here / "hf" / "tokenizer.json").unlink()
    for part in ("vocab.json", "merges.txt"):
        (here / "hf" / part).write_text("{}")
    put(here / "hf" / name)
    refuses(cuadrilla("import", here / "hf", "--to", here / "new"), code=4, naming=name)


def test_a_pickle_that_is_none(here: Path, put: Place) -> None:
    (here / "hf" / "model.safetensors").unlink()
    put(here / "hf" / "pytorch_model.bin")
    refuses(cuadrilla("import", here / "hf", "--to", here / "new", "--trust"), code=6, naming="pytorch_model.bin")


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
    refuses(done, code=4, naming="ended the process that read it")


def test_a_model_card_that_is_none_is_not_read(here: Path, put: Place) -> None:
    put(here / "hf" / "README.md")
    done = cuadrilla("import", here / "hf", "--to", here / "new")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [("import", "--to", "new"), ("generate",), ("eval",), ("report",)])
def test_a_model_or_run_that_is_none(tmp_path: Path, put: Place, command: tuple[str, ...]) -> None:
    put(tmp_path / "thing")
    done = cuadrilla(command[0], tmp_path / "thing", *command[1:], cwd=tmp_path)
    assert done.returncode in (2, 4, 6), done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_large_file_of_weights_is_not_opened(here: Path) -> None:
    """It takes no room on the disk, and would take all memory."""
    with open(here / "hf" / "model.safetensors", "r+b") as file:
        file.truncate(2**43)
    done = cuadrilla("import", here / "hf", "--to", here / "new")
    refuses(done, code=6, naming="8,192.0 GiB of weights, this machine a memory of")


@pytest.mark.parametrize(("name", "most"), [("config.json", 2**20), ("tokenizer.json", 2**26)])
def test_a_large_file_beside_the_weights_is_not_opened(here: Path, name: str, most: int) -> None:
    with open(here / "hf" / name, "r+b") as file:
        file.truncate(most + 1)
    done = cuadrilla("import", here / "hf", "--to", here / "new")
    refuses(done, code=4 if name == "tokenizer.json" else 6, naming=f"{name}: more than {most:,} bytes")


@pytest.mark.parametrize("option", ["--text", "--pairs-file", "--last-word"])
def test_a_test_to_evaluate_on(here: Path, put: Place, option: str) -> None:
    thing = here / "thing.tsv" if option == "--pairs-file" else here / "thing.txt"
    put(thing)
    done = cuadrilla("eval", here / "run", option, thing, "--device", "cpu")
    assert done.returncode == 4, done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_text_to_prepare(tmp_path: Path, put: Place) -> None:
    put(tmp_path / "thing.txt")
    done = cuadrilla("data", "prepare", tmp_path / "thing.txt", "--out", tmp_path / "out")
    assert done.returncode == 4, done.stderr
    assert not (tmp_path / "out").exists()


def test_the_record_of_a_download_beside_text(tmp_path: Path, put: Place) -> None:
    """It says nothing, then."""
    (tmp_path / "text.txt").write_text("Había una vez una niña que tenía un perro muy grande. " * 99)
    put(tmp_path / "SOURCE.json")
    done = cuadrilla("data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "out")
    assert done.returncode == 4, done.stderr
    assert "too little text" in done.stderr


def test_a_tokenizer_to_prepare_with(tmp_path: Path, put: Place) -> None:
    put(tmp_path / "tokenizer.json")
    done = cuadrilla(
        "data", "prepare", "cuentos:200", "--out", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer.json"
    )
    refuses(done, code=4, naming="tokenizer.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
def test_a_data_folder_with_such_a_member(here: Path, put: Place, name: str) -> None:
    put(here / "data" / name)
    refuses(cuadrilla("data", "stats", here / "data"), code=4, naming=name)
    (here / "run" / "tokenizer.json").unlink()
    refuses(cuadrilla("train", here / "run", "--set", "train.steps=4", "--allow-changes"), code=4, naming=name)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_run_with_such_rows_is_not_reported(here: Path, put: Place, name: str) -> None:
    put(here / "run" / name)
    refuses(cuadrilla("report", here / "run"), code=2, naming=name)


def test_what_else_a_run_has_is_left_out_of_its_report(here: Path, put: Place) -> None:
    run = RunDir(here / "run")
    for path in (run.config, run.env, run.status, here / "data" / "manifest.json"):
        put(path)
    done = cuadrilla("report", run.path)
    assert done.returncode == 0, done.stderr
    assert (run.path / "report.html").stat().st_size > 1000


@pytest.mark.parametrize(("name", "code"), [("config.json", 2), ("run.toml", 2)])
def test_a_run_with_such_settings(here: Path, put: Place, name: str, code: int) -> None:
    put(here / "run" / name)
    verb = "train" if name == "run.toml" else "generate"
    refuses(cuadrilla(verb, here / "run"), code=code, naming=name)
