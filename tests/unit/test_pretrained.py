"""Published models: old tokenizers, weights in safetensors or in a pickle; what is refused and why."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizer_json
from cuadrilla.errors import CheckpointError, DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf, state_to_hf
from cuadrilla.model.pretrained import ORIGIN, find_weights, read_pretrained, save_pretrained
from cuadrilla.model.weights import WEIGHTS

TEXT = "  ¿Qué come la niña?\n\nPan — 🙂 <|endoftext|> "
EMBEDDING = "transformer.wte.weight"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["la niña come pan", "el niño ñoño come"] * 4, vocab_size=280)


@pytest.fixture
def published(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A folder with more rows in its embedding than its tokenizer has tokens."""
    folder = tmp_path / "published"
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=tokenizer.vocab_size + 5, context=8, layers=1, heads=2, width=12))
    save_hf(model, folder, tokenizer=tokenizer)
    return folder


def same(one: GPT2, other: GPT2) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


def test_the_two_files_of_an_old_tokenizer_give_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "made.json")
    model = json.loads((tmp_path / "made.json").read_bytes())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (old / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    read = Tokenizer(tokenizer_json(old))
    assert read.encode(TEXT) == tokenizer.encode(TEXT)
    assert read.end_of_text == tokenizer.end_of_text
    (old / "added_tokens.json").write_text(json.dumps({"<|talk|>": tokenizer.vocab_size}))
    more = Tokenizer(tokenizer_json(old))
    assert more.vocab_size == tokenizer.vocab_size + 1
    assert more.encode(TEXT + "<|talk|>") == tokenizer.encode(TEXT + "<|talk|>")  # as plain text
    (old / "vocab.json").write_text("[1]")
    with pytest.raises(DataError, match="cannot read the tokenizer of"):
        tokenizer_json(old)


def test_a_folder_of_transformers_own_tokenizer_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    made = Tokenizer.train([TEXT] * 9, vocab_size=290)
    made.save(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=END_OF_TEXT, additional_special_tokens=["<|pad|>"]
    )
    theirs.save_pretrained(tmp_path / "theirs")
    read = Tokenizer(tokenizer_json(tmp_path / "theirs"))
    assert read.encode(TEXT) == made.encode(TEXT)
    assert read.vocab_size == made.vocab_size + 1


def test_it_is_kept_with_where_it_came_from(published: Path, tmp_path: Path) -> None:
    (published / "README.md").write_text("---\nlicense: mit\ntags:\n- x\n---\nlicense: none\n")
    found = read_pretrained(published, trust=False)
    save_pretrained(found, tmp_path / "kept")
    again = read_pretrained(tmp_path / "kept" / "model.safetensors", trust=False)
    assert same(again.model, found.model)
    origin = json.loads((tmp_path / "kept" / ORIGIN).read_text())
    assert (origin["name"], origin["licence"]) == ("published/model.safetensors", "mit")
    assert again.tokenizer.sha256() == found.tokenizer.sha256()


def test_what_is_missing_is_said(published: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_pretrained(tmp_path / "nothing", trust=False)
    (published / "model.safetensors").rename(published / "pytorch_model.bin")
    assert find_weights(published).name == "pytorch_model.bin"
    with pytest.raises(CheckpointError, match="is a pickle") as caught:
        read_pretrained(published, trust=False)
    assert "--trust" in caught.value.hint
    (published / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="cannot read the tokenizer of"):
        read_pretrained(published / "pytorch_model.bin", trust=False)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(published: Path) -> None:
    Tokenizer.train([TEXT, "otro texto con más letras"] * 20, vocab_size=320).save(published / "tokenizer.json")
    with pytest.raises(DataError, match="307 tokens, the model 280"):
        read_pretrained(published, trust=False)


def test_a_torch_file_gives_the_weights_of_its_safetensors(published: Path) -> None:
    expected = read_pretrained(published, trust=False).model
    state = state_to_hf(expected.state_dict())
    torch.save({"epoch": 3, **state, "lm_head.weight": state[EMBEDDING]}, published / "checkpoint.pt")
    assert same(read_pretrained(published / "checkpoint.pt", trust=True).model, expected)
    (published / "bad.pt").write_bytes(b"PK\x03\x04" + bytes(60))
    torch.save([1, 2], published / "list.pt")
    torch.save({"epoch": 3}, published / "empty.pt")
    for name in ("bad.pt", "list.pt", "empty.pt"):
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read") as caught:
            read_pretrained(published / name, trust=True)
        assert caught.value.hint


class Trap:
    """Runs a command when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def test_a_trap_is_refused_and_nothing_runs(published: Path, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "canary")
    torch.save({"a": torch.ones(1), "b": trap}, published / "trap.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        read_pretrained(published / "trap.bin", trust=False)
    with pytest.raises(CheckpointError, match="unsupported GLOBAL") as caught:
        read_pretrained(published / "trap.bin", trust=True)
    assert "system" in caught.value.message
    (published / "trap.bin").rename(published / WEIGHTS)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_pretrained(published, trust=True)
    assert not trap.canary.exists()
    run, arguments = trap.__reduce__()
    run(*arguments)
    assert trap.canary.exists()  # the trap would have worked
