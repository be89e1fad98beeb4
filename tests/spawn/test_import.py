"""`cuadrilla import --trust`: a pickle gives its tensors, and runs no code."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf, state_to_hf
from cuadrilla.model.pretrained import read_pretrained

pytestmark = pytest.mark.spawn


class Trap:
    """Runs a command when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    tokenizer = Tokenizer.train(["la niña come pan"] * 4, vocab_size=270)
    tokenizer.save(folder / "tokenizer.json")
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=tokenizer.vocab_size, context=8, layers=1, heads=2, width=12))
    save_hf(model, folder, tokenizer_path=folder / "tokenizer.json")
    state = state_to_hf(model.state_dict())
    state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save({"epoch": 3, "model": state}, folder / "checkpoint.pt")
    return folder


def test_a_torch_file_gives_the_weights_of_its_safetensors(published: Path) -> None:
    expected = read_pretrained(published, trust=False)
    found = read_pretrained(published / "checkpoint.pt", trust=True)
    pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_trap_is_refused_and_nothing_runs(published: Path, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "canary")
    torch.save({"a": torch.ones(1), "b": trap}, published / "trap.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        read_pretrained(published / "trap.bin", trust=False)
    with pytest.raises(CheckpointError, match="unsupported GLOBAL") as caught:
        read_pretrained(published / "trap.bin", trust=True)
    assert "system" in caught.value.message
    assert not trap.canary.exists()
    run, arguments = trap.__reduce__()
    run(*arguments)
    assert trap.canary.exists()  # the trap would have worked


def test_a_damaged_file_is_refused(published: Path) -> None:
    (published / "bad.pt").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(CheckpointError, match=r"bad\.pt cannot be read") as caught:
        read_pretrained(published / "bad.pt", trust=True)
    assert caught.value.hint
