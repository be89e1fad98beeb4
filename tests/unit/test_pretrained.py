"""Published models: older forms of a tokenizer, which file holds the weights, what is refused and why."""

import json
from pathlib import Path

import pytest
import torch

from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizer_json
from cuadrilla.errors import CheckpointError, DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf
from cuadrilla.model.pretrained import (
    ORIGIN,
    find_weights,
    read_pretrained,
    save_pretrained,
)
from cuadrilla.model.unpickle import weights_in

pytestmark = pytest.mark.unit

TEXT = "  ¿Qué come la niña?\n\nPan — 🙂 <|endoftext|> "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["la niña come pan", "el niño ñoño come"] * 4, vocab_size=280)


@pytest.fixture
def published(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A folder with more rows in its embedding than its tokenizer has tokens."""
    folder = tmp_path / "published"
    tokenizer.save(tmp_path / "made.json")
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=tokenizer.vocab_size + 5, context=8, layers=1, heads=2, width=12))
    save_hf(model, folder, tokenizer_path=tmp_path / "made.json")
    return folder


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
    pairs = zip(again.model.parameters(), found.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    origin = json.loads((tmp_path / "kept" / ORIGIN).read_text())
    assert (origin["name"], origin["licence"]) == ("published/model.safetensors", "mit")
    assert again.tokenizer == found.tokenizer


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


def test_weights_are_found_beside_other_things() -> None:
    tensors = {"a": torch.ones(1)}
    assert weights_in({**tensors, "epoch": 3}) == tensors
    assert weights_in({"epoch": 3, "model": tensors, "optimizer": {"state": {0: torch.ones(2)}}}) == tensors
    for empty in ({}, {"epoch": 3}, [torch.ones(1)], {0: torch.ones(1)}):
        with pytest.raises(ValueError, match="no named tensors"):
            weights_in(empty)
