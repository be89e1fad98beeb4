"""The types of numbers that may travel between machines and lie in a journal, by their names there."""

import torch

from cuadrilla.errors import TaskError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """Raises TaskError for a type that no other machine and no later program could read."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TaskError(
            "tensors of {dtype} can be neither sent nor kept",
            dtype=name,
            hint="these types can: {types}",
            types=", ".join(DTYPES),
        )
    return name
