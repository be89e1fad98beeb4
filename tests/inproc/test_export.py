"""Export of a trained run, and other programs that read the result."""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.cli.model import export_gguf, export_hf
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import ConfigError
from cuadrilla.model.generate import generate
from cuadrilla.model.sampling import Sampling
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.runfile import read_run_config
from cuadrilla.train.trained import open_model

PROMPT = "Había una vez"


def greedy(language: RunDir, *, tokens: int) -> str:
    found = open_model(language.path, device="cpu", precision="fp32")
    tokenizer = found.tokenizer
    sampling = Sampling(temperature=0, max_tokens=tokens, stop_ids=(tokenizer.end_of_text,))
    ids = list(generate(found.model, tokenizer.encode(PROMPT), sampling=sampling))
    return PROMPT + tokenizer.decode(ids)


def test_transformers_writes_our_text_offline(
    language: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    export_hf(language.path, to=tmp_path / "hf")

    def refuse(*_: object) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    write = transformers.pipeline("text-generation", model=str(tmp_path / "hf"), device="cpu")
    (found,) = write(PROMPT, max_new_tokens=15, do_sample=False)
    assert found["generated_text"] == greedy(language, tokens=15)


def test_the_model_card_says_what_the_run_knows(language: RunDir, tmp_path: Path) -> None:
    export_hf(language.path, to=tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    row = min(last_rows(language.metrics), key=lambda row: row["val_loss"])
    size = sum(tensor.numel() for tensor in open_model(language.path).model.parameters())
    figures = (f"| parameters | {size:,} |", f"| {row['tokens']:,} |", f"{row['val_bits_per_byte']:.4f}")
    told = ("cuentos:80", "CC0-1.0 (generated)", f"| steps | {row['version']} |", "pipeline(", "Modelo de lenguaje")
    assert [fact for fact in (*figures, *told) if fact not in card] == []


def test_a_run_without_its_data_folder_is_exported_and_writes(language: RunDir, tmp_path: Path) -> None:
    moved = RunDir(tmp_path / "moved")
    shutil.copytree(language.path, moved.path)
    assert not (moved.path / read_run_config(moved).data.folder).exists()
    export_hf(moved.path, to=tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == open_model(language.path).tokenizer_path.read_bytes()
    assert greedy(moved, tokens=15) == greedy(language, tokens=15)


def test_a_folder_with_other_things_is_left_alone(language: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"mine\.txt"):
        export_hf(language.path, to=tmp_path)
    for name in (tmp_path / "model.bin", tmp_path, Path(), Path("..")):
        with pytest.raises(ConfigError, match="not the name of a GGUF file") as caught:
            export_gguf(language.path, to=name)
        assert ".gguf" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_a_name_it_has_the_runs(language: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export_hf(language.path)
    export_gguf(language.path)
    assert {path.name for path in tmp_path.iterdir()} == {"run-hf", "run.gguf"}


def test_what_a_killed_export_left_is_no_obstacle(language: RunDir, tmp_path: Path) -> None:
    (tmp_path / ".model.safetensors.123.tmp").write_text("half")
    export_hf(language.path, to=tmp_path)


@pytest.mark.parametrize("half", [False, True])
def test_llama_cpp_writes_our_text(half: bool, language: RunDir, tmp_path: Path) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    pytest.importorskip("gguf", reason="needs the extra export")
    export_gguf(language.path, to=tmp_path / "m.gguf", f16=half)
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=256, n_threads=1, verbose=False)
    tokenizer = Tokenizer.load(open_model(language.path).tokenizer_path)
    for text in (PROMPT, "Lucía  fue\n\na la plaza: «¿Qué tal?» ñandú 1605 🙂", "  El perro \n"):
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text)
    found = theirs.create_completion(tokenizer.encode(PROMPT), max_tokens=15, temperature=0)
    theirs.close()
    assert PROMPT + found["choices"][0]["text"] == greedy(language, tokens=15)
