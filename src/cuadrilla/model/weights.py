"""Weights in Hugging Face's layout: one safetensors file, or several parts with an index.

    model.safetensors        model-00001-of-00002.safetensors ...  model.safetensors.index.json

`read_pickled` is the only place that opens a pickle, after the user said that they trust its author. torch's restricted
reader (`weights_only=True`) builds only tensors and plain values, and refuses every other name.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cuadrilla.errors import CheckpointError
from cuadrilla.messages import Message
from cuadrilla.rundir import storage_errors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth")
NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which training programs store the weights in a larger dictionary."""
AGAIN, NAME_FOLDER = "copy the original again", "name a folder with config.json and model.safetensors"
READING_ERRORS = (UnpicklingError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, OSError)
MAX_REASON = 300


def weights_of(folder: Path) -> Path:
    """The file of a folder's weights: `INDEX` if there is one and no `WEIGHTS`, else `WEIGHTS`, even if missing."""
    return folder / (INDEX if (folder / INDEX).exists() and not (folder / WEIGHTS).exists() else WEIGHTS)


def files_of(path: Path) -> list[Path]:
    """The files with the tensors: `path` itself, or the parts of an index, sorted by name. Raises CheckpointError."""
    if path.name != INDEX:
        return [path]
    try:
        names = set(json.loads(path.read_bytes())["weight_map"].values())
        return [path.with_name(name) for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "{path} is not an index of safetensors: {reason}", path=path, reason=error, hint=AGAIN
        ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of all parts of an index, in their stored dtype. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    for file in files_of(path):
        try:
            tensors |= safetensors.torch.load_file(file)
        except FileNotFoundError as error:
            raise CheckpointError("{path} does not exist", path=file, hint=NAME_FOLDER) from error
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(
                "{path} is not a complete safetensors file ({reason})", path=file, reason=error, hint=AGAIN
            ) from error
    return tensors


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The named tensors in a torch pickle. Raises CheckpointError with torch's reason."""
    try:
        return weights_in(torch.load(path, map_location="cpu", weights_only=True))
    except READING_ERRORS as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CheckpointError(
            "{path} cannot be read: {reason}",
            path=path,
            reason=next((line for line in lines if "unsupported" in line.lower()), lines[-1])[:MAX_REASON],
            hint="only tensors and plain values are read; ask its author for safetensors",
        ) from error


def weights_in(value: Any) -> dict[str, Tensor]:
    """The named tensors in the content of a torch file. Raises ValueError if there are none."""
    for inner in (value, *(value.get(key) for key in NESTED)) if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            found = {key: tensor for key, tensor in inner.items() if isinstance(tensor, Tensor)}
            if found and all(isinstance(key, str) for key in found):
                return found
    raise ValueError("it holds no named tensors")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. In the end the file written there replaces `path`. Raises ResourceError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def some(names: list[str]) -> str:
    """Text with the first four names, and the number of the others."""
    shown = reduce(lambda one, other: Message("{one}, {other}", one=one, other=other), names[:4])
    return Message("{shown} and {more} more", shown=shown, more=len(names) - 4) if len(names) > 4 else shown
