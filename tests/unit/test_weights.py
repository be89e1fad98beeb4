"""Weights in several files: read as the whole would be; an index or a part that does not fit is named."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import load_hf, save_hf
from cuadrilla.model.pretrained import ORIGIN, read_pretrained, save_pretrained
from cuadrilla.model.weights import INDEX, WEIGHTS

pytestmark = pytest.mark.unit

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HEAD = "transformer.wte.weight"


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(3)
    return GPT2(GPT2Config(vocab_size=300, context=8, layers=1, heads=2, width=12))


@pytest.fixture
def folder(model: GPT2, tmp_path: Path) -> Path:
    """A published model whose embedding is in the first file, and all else in the second."""
    folder = tmp_path / "published"
    Tokenizer.train(["la niña come pan", "el niño ñoño come"] * 4, vocab_size=280).save(tmp_path / "made.json")
    save_hf(model, folder, tokenizer_path=tmp_path / "made.json")
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    safetensors.torch.save_file({HEAD: tensors.pop(HEAD)}, folder / FIRST)
    safetensors.torch.save_file(tensors, folder / SECOND)
    write_index(folder, {HEAD: FIRST, **dict.fromkeys(tensors, SECOND)})
    return folder


def write_index(folder: Path, places: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))


def places(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def same(one: GPT2, other: GPT2) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


def test_parts_are_read_as_the_whole(model: GPT2, folder: Path, tmp_path: Path) -> None:
    for source in (folder, folder / INDEX):
        assert same(read_pretrained(source, trust=False).model, model)
    save_pretrained(read_pretrained(folder, trust=False), tmp_path / "kept")
    assert same(load_hf(tmp_path / "kept"), model)
    origin = json.loads((tmp_path / "kept" / ORIGIN).read_text())
    assert origin["name"] == f"published/{INDEX}"
    safetensors.torch.save_file(safetensors.torch.load_file(folder / FIRST), folder / FIRST, metadata={"other": "x"})
    save_pretrained(read_pretrained(folder, trust=False), tmp_path / "again")
    assert json.loads((tmp_path / "again" / ORIGIN).read_text())["sha256"] != origin["sha256"]


def test_the_parts_of_transformers_are_read(model: GPT2, folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    assert len(list((tmp_path / "theirs").glob("model-*-of-*.safetensors"))) > 1
    assert same(load_hf(tmp_path / "theirs"), model)


def test_a_whole_file_comes_first(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_hf(folder)


def test_missing_parts_are_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} does not exist") as caught:
        read_pretrained(folder, trust=False)
    assert caught.value.hint


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..", "a" * 300 + ".safetensors", 3, None],
)  # fmt: skip
def test_a_part_is_a_file_of_the_folder(folder: Path, name: object) -> None:
    safetensors.torch.save_file(safetensors.torch.load_file(folder / FIRST), folder.parent / "outside.safetensors")
    write_index(folder, places(folder) | {HEAD: name})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=r"not an index|not a complete|does not exist"):
        load_hf(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, '{"weight_map": []}'])
def test_a_broken_index_is_refused(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="is not an index") as caught:
        load_hf(folder)
    assert len(caught.value.message.splitlines()) == 1
