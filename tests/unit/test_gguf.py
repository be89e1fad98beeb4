"""GGUF: the file read back has our tensors, and a forward pass written from llama.cpp's layout has our logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.model.gguf import write_gguf
from cuadrilla.model.gpt2 import GPT2
from tests.decided import spread_gpt2

gguf = pytest.importorskip("gguf", reason="needs the extra export")
SPARE_ROWS = 3  # of the embedding, which no token has


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(["la niña come pan", "el niño ñoño come"] * 4, vocab_size=280).save(path)
    return path


@pytest.fixture(scope="module")
def model(tokenizer_path: Path) -> GPT2:
    """No two sizes are equal."""
    rows = Tokenizer.load(tokenizer_path).vocab_size + SPARE_ROWS
    return spread_gpt2(0.1, vocab_size=rows, context=24, layers=2, heads=3, width=42)


def write(model: GPT2, tokenizer_path: Path, path: Path, *, half: bool = False) -> Any:
    about = {"name": "prueba", "description": "d", "license": "CC0-1.0"}
    write_gguf(path, model=model, tokenizer_path=tokenizer_path, half=half, about=about)
    return gguf.GGUFReader(path)


def value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def forward(reader: Any, ids: Tensor) -> Tensor:
    """GPT-2 as llama.cpp computes it: `y = W x`, with W stored as (out, in) and the head taken from the embedding."""
    tensors = {tensor.name: torch.from_numpy(np.array(tensor.data)).float() for tensor in reader.tensors}
    heads, epsilon = value(reader, "gpt2.attention.head_count"), value(reader, "gpt2.attention.layer_norm_epsilon")

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], epsilon)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    length = ids.shape[1]
    x = tensors["token_embd.weight"][ids] + tensors["position_embd.weight"][:length]
    for layer in range(value(reader, "gpt2.block_count")):
        prefix = f"blk.{layer}"
        parts = linear(norm(x, f"{prefix}.attn_norm"), f"{prefix}.attn_qkv").chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(2, 3)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{prefix}.attn_output")
        hidden = F.gelu(linear(norm(x, f"{prefix}.ffn_norm"), f"{prefix}.ffn_up"), approximate="tanh")
        x = x + linear(hidden, f"{prefix}.ffn_down")
    return norm(x, "output_norm") @ tensors["token_embd.weight"].T


@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-4), (True, 2e-2)])
def test_the_file_read_back_computes_our_logits(
    model: GPT2, tokenizer_path: Path, tmp_path: Path, half: bool, tolerance: float
) -> None:
    reader = write(model, tokenizer_path, tmp_path / "m.gguf", half=half)
    ids = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(forward(reader, ids), model(ids), atol=tolerance, rtol=tolerance)
    narrow = {tensor.name for tensor in reader.tensors if tensor.data.dtype == np.float16}
    matrices = {tensor.name for tensor in reader.tensors if tensor.data.ndim == 2} - {"position_embd.weight"}
    assert narrow == (matrices if half else set())
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_it_says_what_llama_cpp_looks_for(model: GPT2, tokenizer_path: Path, tmp_path: Path) -> None:
    reader = write(model, tokenizer_path, tmp_path / "m.gguf")
    tokenizer = Tokenizer.load(tokenizer_path)
    expected = {
        "general.architecture": "gpt2", "general.name": "prueba", "general.license": "CC0-1.0",
        "general.file_type": 0, "gpt2.context_length": 24, "gpt2.embedding_length": 42,
        "gpt2.feed_forward_length": 168, "gpt2.block_count": 2, "gpt2.attention.head_count": 3,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": tokenizer.end_of_text, "tokenizer.ggml.eos_token_id": tokenizer.end_of_text,
    }  # fmt: skip
    assert {key: value(reader, key) for key in expected} == expected
    tokens, types = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(set(tokens)) == len(types) == model.config.vocab_size
    assert tokens[tokenizer.end_of_text] == END_OF_TEXT
    assert types[tokenizer.end_of_text] == gguf.TokenType.CONTROL
    assert types[-SPARE_ROWS:] == [gguf.TokenType.UNUSED] * SPARE_ROWS
    assert types.count(gguf.TokenType.NORMAL) == tokenizer.vocab_size - 1
    raw = json.loads(tokenizer_path.read_bytes())["model"]
    assert [raw["vocab"][token] for token in tokens[1:-SPARE_ROWS]] == list(range(1, tokenizer.vocab_size))
    assert value(reader, "tokenizer.ggml.merges")[0].split(" ") == list(raw["merges"][0])


@pytest.mark.parametrize(
    "change", [{"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, {"model": {"ignore_merges": True}}]
)
def test_a_tokenizer_that_would_split_otherwise_is_refused(
    change: dict[str, Any], model: GPT2, tokenizer_path: Path, tmp_path: Path
) -> None:
    values = json.loads(tokenizer_path.read_bytes())
    other = tmp_path / "tokenizer.json"
    for section, changed in change.items():
        values[section] |= changed
    other.write_text(json.dumps(values))
    with pytest.raises(DataError, match="does not split text as GPT-2 does"):
        write(model, other, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == [other]
