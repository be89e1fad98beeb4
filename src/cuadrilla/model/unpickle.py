"""The one place where a pickle is opened: by torch's restricted reader, for whoever trusts its author.

`weights_only=True` builds tensors and plain values only, and refuses every other name.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from cuadrilla.errors import CheckpointError

NESTED = ("state_dict", "model_state_dict", "model")
"""Where training programs put the weights beside other things."""
MAX_REASON = 300
READING_ERRORS = (UnpicklingError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, OSError)


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The named tensors of a torch file. Raises CheckpointError with torch's reason."""
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
    """The named tensors of what a torch file held. Raises ValueError if there are none."""
    if isinstance(value, dict):
        for inner in (value, *(value.get(key) for key in NESTED)):
            if isinstance(inner, dict):
                found = {key: tensor for key, tensor in inner.items() if isinstance(tensor, Tensor)}
                if found and all(isinstance(key, str) for key in found):
                    return found
    raise ValueError("it holds no named tensors")
