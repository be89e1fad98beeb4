"""A checkpoint is complete and verified, or absent: damage of every kind is found, and the one before is used."""

import itertools
import json
import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cuadrilla.errors import CheckpointError
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.train import checkpoint as c

TENSORS = {"a.weight": torch.arange(1000, dtype=torch.float32), "b": torch.tensor(3.0)}


def save(folder: Path, version: int) -> Path:
    model = {name: tensor + version for name, tensor in TENSORS.items()}
    return c.save_checkpoint(folder, model=model, optimizer={"step.b": torch.tensor(1.0)}, state={"version": version})


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert sorted(p.name for p in path.iterdir()) == sorted([*c.FILES, c.MANIFEST])
    assert c.find_newest(tmp_path) == path == tmp_path / "v00000007"
    assert torch.equal(read_tensors(path / WEIGHTS)["a.weight"], TENSORS["a.weight"] + 7)
    assert c.find_newest(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", [*c.FILES, c.MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "zero", "missing", "grow"])
def test_damage_is_found_and_the_one_before_is_used(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    raw = bytearray(file.read_bytes())
    match damage:
        case "flip":
            raw[len(raw) // 2] ^= 0x10
            file.write_bytes(raw)
        case "cut":
            file.write_bytes(raw[: len(raw) // 2])
        case "zero":
            file.write_bytes(bytes(len(raw)))
        case "missing":
            file.unlink()
        case "grow":
            file.write_bytes(raw + b" {")
    assert c.find_newest(tmp_path) == tmp_path / "v00000001"


def test_swapped_files_and_an_edited_manifest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    model, optimizer = path / "model.safetensors", path / "optimizer.safetensors"
    model.rename(path / "x")
    optimizer.rename(model)
    (path / "x").rename(optimizer)
    assert c.find_newest(tmp_path) == tmp_path / "v00000001"
    path = save(tmp_path, 3)
    manifest = json.loads((path / c.MANIFEST).read_text())
    manifest["files"]["../../etc/passwd"] = manifest["files"].pop("state.json")
    (path / c.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"state\.json is missing or damaged"):
        c.verify_checkpoint(path)


def test_a_crash_at_any_step_of_a_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies (SystemExit past every handler) before its n-th fsync, rename or write of a tensor file."""

    class Crash(BaseException):
        pass

    for limit in range(12):
        folder = tmp_path / str(limit)
        save(folder, 1)
        calls = 0

        def count(limit: int = limit) -> None:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Crash

        real_fsync, real_rename, real_save = os.fsync, os.rename, safetensors.torch.save_file
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd, real=real_fsync: (count(), real(fd))[1])
            patch.setattr(os, "rename", lambda a, b, real=real_rename: (count(), real(a, b))[1])
            patch.setattr(safetensors.torch, "save_file", lambda t, p, real=real_save: (count(), real(t, p))[1])
            patch.setattr("shutil.rmtree", lambda *a, **k: None)  # a dead process does not clean up
            try:
                save(folder, 2)
                finished = True
            except Crash:
                finished = False
        version = c.version_of(c.find_newest(folder) or folder)
        assert version in ((1, 2) if calls > 8 else (1,)) or finished
        if finished:
            assert version == 2
        assert save(folder, 3).exists()
        assert not list(folder.glob(".v*.tmp"))
    assert finished


def test_a_reader_finds_a_checkpoint_while_older_ones_are_removed(tmp_path: Path) -> None:
    stop = threading.Event()

    def train() -> None:
        for version in itertools.count(2):
            save(tmp_path, version)
            c.prune_checkpoints(tmp_path, keep=2, protect=())
            if stop.is_set():
                return

    save(tmp_path, 1)
    writer = threading.Thread(target=train)
    writer.start()
    try:
        seen = [0]
        while seen[-1] < 20:
            found = c.find_newest(tmp_path)
            assert found is not None
            seen.append(c.version_of(found))
    finally:
        stop.set()
        writer.join()
    assert seen == sorted(seen)
