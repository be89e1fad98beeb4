"""`cuadrilla import --trust`: pickles in a child that may not run code, call out, or take all memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf, state_to_hf
from cuadrilla.model.pretrained import read_pretrained
from cuadrilla.model.unpickle import read_pickled

pytestmark = pytest.mark.spawn

CUT_OFF = """
import json, os, socket, subprocess
from cuadrilla.host.sandbox import cut_off
def attempt(act):
    try:
        act()
        return "done"
    except PermissionError:
        return "refused"
note = cut_off()
acts = {
    "socket": socket.socket, "program": lambda: subprocess.run(["true"]),
    "shell": lambda: os.execv("/bin/sh", ["sh"]), "signal": lambda: os.kill(os.getppid(), 0),
    "file": lambda: open(os.devnull).read(),
}
print(json.dumps({"note": note, **{name: attempt(act) for name, act in acts.items()}}))
"""


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
    assert found.note == "" or sys.platform != "linux"


def test_a_trap_is_refused_and_nothing_runs(published: Path, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "canary")
    torch.save({"a": torch.ones(1), "b": trap}, published / "trap.bin")
    with pytest.raises(CheckpointError, match="unsupported GLOBAL") as caught:
        read_pretrained(published / "trap.bin", trust=True)
    assert "system" in caught.value.message
    assert not trap.canary.exists()
    run, arguments = trap.__reduce__()
    run(*arguments)
    assert trap.canary.exists()  # the trap would have worked


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: memory is limited by RLIMIT_AS there")
def test_a_small_file_that_unfolds_to_a_large_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(2**40)}, tmp_path / "bomb.pt")
    with pytest.raises(CheckpointError, match="memory"):
        read_pickled(tmp_path / "bomb.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(CheckpointError, match=r"bad\.pt cannot be read") as caught:
        read_pickled(tmp_path / "bad.pt", tmp_path / "out.safetensors")
    assert caught.value.hint


def test_a_child_that_takes_too_long_is_ended(published: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was not read within 0 s"):
        read_pickled(published / "checkpoint.pt", tmp_path / "out.safetensors", timeout_seconds=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: seccomp")
def test_the_child_opens_no_socket_and_starts_no_program() -> None:
    done = subprocess.run([sys.executable, "-c", CUT_OFF], capture_output=True, text=True, timeout=150, check=True)
    found = json.loads(done.stdout)
    if found["note"]:
        pytest.skip(f"needs seccomp: {found['note']}")
    refused = {name for name, outcome in found.items() if outcome == "refused"}
    assert refused == {"socket", "program", "shell", "signal"}
    assert found["file"] == "done"
