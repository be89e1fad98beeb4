"""Checkpoints: complete and verified, or absent.

A checkpoint is the folder `checkpoints/v%08d/` with model.safetensors, optimizer.safetensors, state.json and
manifest.json (the SHA-256 of the others). It is written under a temporary name, every file and folder is fsynced, and
one rename makes it exist. Nothing is removed before its successor is complete. Loading first checks every byte. The
newest checkpoint that verifies is used, and newer ones that do not are reported. The `keep` newest stay, and the one
with the lowest held-out loss by the rows of metrics.jsonl.
Tests: a bit flipped, a file cut, missing, swapped, a manifest edited, a crash after every step of a save.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cuadrilla.errors import CheckpointError
from cuadrilla.messages import Message
from cuadrilla.model.weights import WEIGHTS, some
from cuadrilla.rundir import (
    RunDir,
    file_sha256,
    fsync_folder,
    last_rows,
    make_private,
    read_object,
    storage_errors,
)
from cuadrilla.version import __version__

OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
FILES = (WEIGHTS, OPTIMIZER, STATE)
MANIFEST = "manifest.json"
OLDER = "an older checkpoint is used if there is one"
CHECKPOINT_NAME = re.compile(r"v(\d{8,})")

log = logging.getLogger(__name__)


def save_checkpoint(
    folder: Path, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Path:
    """Write `folder/v%08d` for `state["version"]` and return its path.

    Raises ResourceError, leaving older ones intact.
    """
    target = folder / f"v{state['version']:08d}"
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    with storage_errors(target):
        make_private(folder)
        _remove_leftovers(folder)
        temporary.mkdir()
        try:
            _write_files(temporary, model=model, optimizer=optimizer, state=state)
            _put(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def adopt_checkpoint(arrived: Path, folder: Path) -> None:
    """Make a checkpoint that has arrived from another machine one of those in `folder`, if it agrees with its manifest.

    `arrived`: its folder, on the same file system. Raises CheckpointError, ResourceError.
    """
    verify_checkpoint(arrived)
    make_private(folder)
    with storage_errors(folder):
        _put(arrived, folder / arrived.name)


def find_newest(folder: Path, *, set_aside: bool = False) -> Path | None:
    """Path of the newest checkpoint that verifies; None if there is none at all. Raises CheckpointError if none
    verifies.

    A training that goes on may remove checkpoints after they were listed; then there are newer ones to try.
    `set_aside`: rename the newer ones, which do not verify. They are not listed any more; their files stay. Only the
    run's writer does this. Raises ResourceError.
    """
    problems: dict[Path, str] = {}
    while untried := [path for path in list_checkpoints(folder) if path not in problems]:
        try:
            newest = verify_checkpoint(untried[-1])
        except CheckpointError as error:
            problems[untried[-1]] = error.message
            log.warning("%s; trying the one before", error.message)
        else:
            _set_aside(problems if set_aside else ())
            return newest
    if problems:
        raise CheckpointError(
            "none of the {checkpoints} checkpoints in {folder} can be used: {reason}",
            checkpoints=len(problems),
            folder=folder,
            reason=next(iter(problems.values())),
            hint="restore one from a backup, or start again with an empty {name} folder",
            name=folder.name,
        )
    return None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The run's step that a model's weights are from, with its verified checkpoint; no path: the initial weights."""

    version: int = 0
    newest: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        if self.version == self.newest:
            return Message("step {step}", step=self.version)
        return Message(
            "step {step} (lowest held-out loss; the newest is {newest})",
            step=self.version,
            newest=self.newest,
        )


def choose_step(run: RunDir, *, newest: bool = False) -> Step:
    """The step that `run` names, else the one with the lowest held-out loss by its rows, else the newest.

    `newest`: the held-out loss does not count. Raises CheckpointError if no checkpoint verifies, or the named one does
    not.
    """
    if run.version is not None:
        path = verify_checkpoint(run.checkpoints / f"v{run.version:08d}")
        return Step(version=run.version, newest=run.version, path=path)
    found = find_newest(run.checkpoints)
    if found is None:
        return Step()
    last = version_of(found)
    best = best_version(run, upto=last)
    if not newest and best is not None and best != last:
        try:
            path = verify_checkpoint(run.checkpoints / f"v{best:08d}")
            return Step(version=best, newest=last, path=path)
        except CheckpointError as error:
            log.warning("%s; the newest is used instead of the best one", error.message)
    return Step(version=last, newest=last, path=found)


def best_version(run: RunDir, *, upto: int) -> int | None:
    """The step with the lowest held-out loss, of those up to `upto`; None if it was not measured."""
    return lowest(held_out_losses(run, upto=upto))


def held_out_losses(run: RunDir, *, upto: int) -> dict[int, float]:
    """The held-out losses in the run's rows by the step, up to the step `upto`; NaN if one was not finite."""
    rows = (row for row in last_rows(run.metrics) if "val_loss" in row and row["version"] <= upto)
    return {row["version"]: math.nan if row["val_loss"] is None else row["val_loss"] for row in rows}


def lowest(losses: Mapping[int, float]) -> int | None:
    """The first step with the lowest of these losses; None if none is finite."""
    return min(filter(lambda step: math.isfinite(losses[step]), losses), key=losses.__getitem__, default=None)


@torch.no_grad()
def copy_into(tensors: Mapping[str, Tensor], found: Mapping[str, Tensor], *, path: Path) -> None:
    """Copy the values `found` in `path` to a model's `tensors`. Raises CheckpointError if they are another model's."""
    check_shapes(tensors, found, path=path)
    for name, tensor in tensors.items():
        tensor.copy_(found[name])


def verify_checkpoint(path: Path) -> Path:
    """Compare the files with their hashes in the manifest. Raises CheckpointError naming the first that differs."""
    files = read_object(path / MANIFEST).get("files")
    for name in FILES:
        try:
            same = isinstance(files, dict) and file_sha256(path / name) == files.get(name)
        except OSError:  # removed while it was read, or a failing disk
            same = False
        if not same:
            raise CheckpointError("{path}: {name} is missing or damaged", path=path, name=name, hint=OLDER)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; not verified."""
    found = [path.parent for path in folder.glob(f"v*/{MANIFEST}") if CHECKPOINT_NAME.fullmatch(path.parent.name)]
    return sorted(found, key=version_of)


def version_of(path: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _set_aside(damaged: Iterable[Path]) -> None:
    for path in damaged:
        aside = path.with_name(f".{path.name}.damaged")
        with storage_errors(aside):
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def prune_checkpoints(folder: Path, *, keep: int, protect: Collection[int | None]) -> None:
    for path in (path for path in list_checkpoints(folder)[:-keep] if version_of(path) not in protect):
        doomed = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.rename(path, doomed)  # a reader that has opened files of it can finish; a new reader does not find it
        shutil.rmtree(doomed, ignore_errors=True)


def check_shapes(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, path: Path) -> None:
    """Raise CheckpointError listing names, dtypes and shapes that differ between the model and a checkpoint."""
    forms = {name: (_form(found.get(name)), _form(expected.get(name))) for name in sorted({*expected, *found})}
    differing: list[str] = [
        Message("{name} {found} instead of {expected}", name=name, found=theirs, expected=ours)
        for name, (theirs, ours) in forms.items()
        if theirs != ours
    ]
    if differing:
        raise CheckpointError(
            "{path} belongs to another model: {differences}",
            path=path,
            differences=some(differing),
            hint="put the run file or the task back, or delete {folder} to begin anew",
            folder=path.parent,
        )


def _form(tensor: Tensor | None) -> str:
    return "-" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each storage once: what a checkpoint holds."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """One hash over names, shapes and bytes: equal models have equal hashes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        if tensor.numel():
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write_files(
    folder: Path, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    for name, tensors in ((WEIGHTS, model), (OPTIMIZER, optimizer)):
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        safetensors.torch.save_file(plain, folder / name)
    (folder / STATE).write_text(json.dumps(state, ensure_ascii=False))
    manifest = {"cuadrilla": __version__, "files": {name: file_sha256(folder / name) for name in FILES}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for name in (*FILES, MANIFEST):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def _put(made: Path, target: Path) -> None:
    """Give a complete folder its name, durably."""
    if target.exists():  # the same version was saved before and did not verify, or a rerun ended here
        shutil.rmtree(target)
    os.rename(made, target)
    fsync_folder(target.parent)


def _remove_leftovers(folder: Path) -> None:
    """Remove half-written or half-removed checkpoints of a process that was killed."""
    for path in folder.glob(".v*"):
        if path.suffix in (".tmp", ".old") and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
