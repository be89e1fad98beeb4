"""What the processes of `bench.link` send one another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TENSOR_ELEMENTS = 2**22
Times = dict[str, float]


def model(num_parameters: int) -> dict[str, Tensor]:
    """Tensors with that many fp32 elements; every process makes the same."""
    sizes = [TENSOR_ELEMENTS] * (num_parameters // TENSOR_ELEMENTS) + [num_parameters % TENSOR_ELEMENTS]
    return {f"layer.{i:03d}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes) if size}


def check(received: Any, expected: Mapping[str, Tensor]) -> None:
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
