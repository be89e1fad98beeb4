"""Weights in Hugging Face's layout: one safetensors file, or a torch pickle.

`read_pickled` is the only place that opens a pickle, after the user said that they trust its author. torch's restricted
reader (`weights_only=True`) builds only tensors and plain values, and refuses every other name.
"""

from functools import reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cuadrilla.errors import CheckpointError
from cuadrilla.messages import Message

WEIGHTS = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth")
AGAIN, NAME_FOLDER = "copy the original again", "name a folder with config.json and model.safetensors"
READING_ERRORS = (UnpicklingError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, OSError)
MAX_REASON = 300


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, in their stored dtype. Raises CheckpointError."""
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError("{path} does not exist", path=path, hint=NAME_FOLDER) from error
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            "{path} is not a complete safetensors file ({reason})", path=path, reason=error, hint=AGAIN
        ) from error


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The named tensors in a torch pickle. Raises CheckpointError with torch's reason."""
    try:
        return _named_tensors(torch.load(path, map_location="cpu", weights_only=True))
    except READING_ERRORS as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CheckpointError(
            "{path} cannot be read: {reason}",
            path=path,
            reason=next((line for line in lines if "unsupported" in line.lower()), lines[-1])[:MAX_REASON],
            hint="only tensors and plain values are read; ask its author for safetensors",
        ) from error


def _named_tensors(value: Any) -> dict[str, Tensor]:
    """The named tensors in the content of a torch file. Raises ValueError if there are none."""
    found = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    if not found or not all(isinstance(name, str) for name in found):
        raise ValueError("it holds no named tensors")
    return found


def some(names: list[str]) -> str:
    """Text with the first four names, and the number of the others."""
    shown = reduce(lambda one, other: Message("{one}, {other}", one=one, other=other), names[:4])
    return Message("{shown} and {more} more", shown=shown, more=len(names) - 4) if len(names) > 4 else shown
