"""Hugging Face folders: the same logits as transformers both ways, and refusal of everything that is not ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.errors import CheckpointError, ResourceError
from cuadrilla.model.generate import generate_batch
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import config_from_hf, config_to_hf, load_hf, save_hf, state_from_hf, state_to_hf
from cuadrilla.model.sampling import Sampling
from tests.conftest import SMALL_DISK_BYTES
from tests.decided import spread_gpt2

SHAPES = [
    {"vocab_size": 64, "context": 16, "layers": 1, "heads": 1, "width": 8},
    {"vocab_size": 1003, "context": 33, "layers": 3, "heads": 3, "width": 42},
]
SMALL = SHAPES[0]


def make(shape: dict[str, int]) -> GPT2:
    return spread_gpt2(0.1, **shape)


def ids_for(model: GPT2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (2, model.config.context), generator=generator)


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra hf")


PECULIAR = [
    {},
    {"exact_gelu": True},
]


@pytest.mark.parametrize("peculiar", PECULIAR, ids=str)
def test_both_compute_the_same_of_folders_of_either(peculiar: dict[str, Any], tmp_path: Path) -> None:
    """Also for a transformers model without a head, whose weights lack the prefix in their names."""
    shape, eager, hf = {**SHAPES[1], **peculiar}, {"attn_implementation": "eager"}, transformers()
    theirs = hf.GPT2LMHeadModel(hf.GPT2Config(**config_to_hf(GPT2Config(**shape), end_of_text=None), **eager))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.eval().save_pretrained(tmp_path)
    model = load_hf(tmp_path).eval()
    assert model.config == GPT2Config(**shape)
    ids = ids_for(model)
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=1e-4)
        model.compute_dtype = torch.bfloat16  # its attention is another one on a CPU
        assert (model(ids) - expected).abs().mean() < 0.05 * expected.abs().mean()
    model.compute_dtype = torch.float32
    written = generate_batch(model, [[1, 2, 3]], sampling=Sampling(temperature=0, max_tokens=9))
    assert written == [theirs.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9, do_sample=False)[0, 3:].tolist()]
    save_hf(model, tmp_path / "ours")
    opened, report = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", output_loading_info=True, **eager)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(opened.eval()(ids).logits, model(ids), atol=1e-4, rtol=1e-4)
    theirs.transformer.save_pretrained(tmp_path / "bare")
    for name in ("ours", "bare"):
        found = load_hf(tmp_path / name).parameters()
        assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))
    head = model.transformer.wte.weight
    loss = model.train().loss(ids, ids)
    loss.backward()
    assert head.grad is not None
    assert head.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_weights_are_read_as_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(SMALL)
    save_hf(model, tmp_path)
    state = {name: value.to(dtype) for name, value in state_to_hf(model.state_dict()).items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    loaded = load_hf(tmp_path)
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float32, name
        assert torch.equal(ours, theirs.to(dtype).float()), name


def test_old_buffers_are_ignored_and_an_equal_head_is_accepted() -> None:
    model = make(SMALL)
    state = state_to_hf(model.state_dict())
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    ours = state_from_hf(state)
    assert ours.keys() == model.state_dict().keys()
    assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    hf = transformers()
    tokenizer = Tokenizer.train(["la niña come pan", "el niño ñoño come"] * 4, vocab_size=280)
    model = make({**SMALL, "vocab_size": tokenizer.vocab_size})
    save_hf(model, tmp_path / "out", tokenizer=tokenizer)
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "  ¿Qué come la niña?\n\nPan — 🙂 "
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token == END_OF_TEXT
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert theirs.eos_token_id == generation["eos_token_id"] == config["eos_token_id"] == tokenizer.end_of_text
    assert config["n_ctx"] == 16  # which llama.cpp's converter reads


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "GPT2ForSequenceClassification"),
        ({"activation_function": "relu"}, "activation_function = 'relu'"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ({"n_inner": 48}, "n_inner 48 is not 4 times"),
        ({"n_layer": 10**9}, "n_layer = 1000000000"),
        ({"n_embd": "8"}, "n_embd = '8'"),
        ({"n_head": 3}, "n_embd 8 is not divisible by n_head 3"),
        ({"vocab_size": True}, "vocab_size = True"),
    ],
)
def test_other_architectures_and_impossible_sizes_are_refused(changes: dict[str, Any], says: str) -> None:
    values = config_to_hf(GPT2Config(**SMALL), end_of_text=None)
    assert config_from_hf(values) == GPT2Config(**SMALL)
    with pytest.raises(CheckpointError) as caught:
        config_from_hf(values | changes)
    assert says in caught.value.message
    assert caught.value.hint


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_hf(make(SMALL), tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del state["transformer.h.0.mlp.c_fc.bias"]
    state |= {"transformer.h.7.ln_1.bias": torch.zeros(32), "transformer.wpe.weight": torch.zeros(17)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_hf(tmp_path)
    assert 'Missing key(s) in state_dict: "transformer.h.0.mlp.c_fc.bias"' in caught.value.message
    assert 'Unexpected key(s) in state_dict: "transformer.h.7.ln_1.bias"' in caught.value.message
    assert "size mismatch for transformer.wpe.weight" in caught.value.message
    assert caught.value.hint


def test_a_file_longer_than_it_says_is_refused_unread(tmp_path: Path) -> None:
    """A sparse file of eight terabytes, which takes no room on the disk."""
    save_hf(make(SMALL), tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(2**43)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("config.json", None, "cannot read"),
        ("config.json", b"[1]", "does not describe a supported GPT-2"),
        ("config.json", b"[" * 100_000, "cannot read"),
        ("config.json", b'{"n_embd": 8}', "vocab_size is missing"),
        ("model.safetensors", None, "does not exist"),
    ],
)
def test_missing_and_broken_parts_are_named(name: str, raw: bytes | None, says: str, tmp_path: Path) -> None:
    save_hf(make(SMALL), tmp_path)
    if raw is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        load_hf(tmp_path)
    assert name in caught.value.message
    assert says in caught.value.message


def test_a_full_disk_is_said_and_leaves_nothing(small_disk: Path) -> None:
    large = GPT2(GPT2Config(vocab_size=SMALL_DISK_BYTES // 64, context=8, layers=1, heads=2, width=32))
    with pytest.raises(ResourceError, match="No space left"):
        save_hf(large, small_disk / "full")
    assert list((small_disk / "full").iterdir()) == []
    save_hf(make(SMALL), small_disk / "full")
