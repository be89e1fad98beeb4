"""The one place where a pickle is opened: by torch's restricted reader, for whoever trusts its author.

`weights_only=True` builds tensors and plain values only, and refuses every other name.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cuadrilla.errors import CheckpointError
from cuadrilla.model.weights import require_weights
from cuadrilla.rundir import storage_errors

NESTED = ("state_dict", "model_state_dict", "model")
"""Where training programs put the weights beside other things."""
MAX_REASON = 300
READING_ERRORS = (UnpicklingError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError)


def convert_pickled(source: Path, target: Path) -> None:
    """Turn a torch file into safetensors. Raises CheckpointError with torch's reason, ResourceError without room."""
    require_weights(source)
    try:
        tensors = weights_in(torch.load(source, map_location="cpu", weights_only=True))
    except READING_ERRORS as error:
        raise CheckpointError(
            "{path} cannot be read: {reason}",
            path=source,
            reason=_reason(error),
            hint="only tensors and plain values are read; ask its author for safetensors",
        ) from error
    # Each on its own: a tied head shares its memory with the embedding, which safetensors refuses.
    with storage_errors(target):
        try:
            safetensors.torch.save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target)
        except safetensors.SafetensorError as error:  # how the library reports a full or failing disk
            raise OSError(None, str(error)) from error


def _reason(error: Exception) -> str:
    """The line that names what was refused, else the last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "unsupported" in line.lower()), lines[-1])[:MAX_REASON]


def weights_in(value: Any) -> dict[str, Tensor]:
    """The named tensors of what a torch file held. Raises ValueError if there are none."""
    if isinstance(value, dict):
        for inner in (value, *(value.get(key) for key in NESTED)):
            if isinstance(inner, dict):
                found = {key: tensor for key, tensor in inner.items() if isinstance(tensor, Tensor)}
                if found and all(isinstance(key, str) for key in found):
                    return found
    raise ValueError("it holds no named tensors")
