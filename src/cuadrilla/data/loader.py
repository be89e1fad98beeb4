"""Batches for leased units: seed and unit decide which sequences of a map-style dataset are stacked."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cuadrilla.data.order import sequence_indices
from cuadrilla.errors import TaskError


class Dataset(Protocol):
    """A map-style dataset: item i maps names to arrays without a batch dimension. It is the same on every machine."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class UnitLoader:
    """Builds any unit of the run on demand. It keeps no position in the data."""

    def __init__(self, dataset: Dataset, *, seed: int, unit_sequences: int, device: torch.device) -> None:
        if len(dataset) == 0:
            raise TaskError("the training data is empty", hint="data('train') must hold at least one example")
        self._dataset = dataset
        self._seed = seed
        self._unit_sequences = unit_sequences
        self._device = device

    def indices(self, units: Sequence[int]) -> npt.NDArray[np.int64]:
        """Sequence numbers of the units, one after the other, shape (len(units) * unit_sequences,)."""
        per_unit = [
            sequence_indices(
                self._seed, start=unit * self._unit_sequences, count=self._unit_sequences, length=len(self._dataset)
            )
            for unit in units
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *per_unit])

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """The sequences with these numbers, stacked, on the device."""
        return to_device(collate([self._dataset[int(index)] for index in indices]), self._device)


def collate(items: Sequence[Any]) -> dict[str, Tensor]:
    """Stack items along a new first dimension. Raises TaskError if they are not mappings, or their shapes differ."""
    if not isinstance(items[0], Mapping):
        template = "an item of data(…) is a {kind}, not a mapping of names to arrays"
        raise TaskError(template, kind=type(items[0]).__name__, hint='return {{"x": x, "y": y}}')
    return {key: _stack([torch.as_tensor(item[key]) for item in items], name=key) for key in items[0]}


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def _stack(tensors: list[Tensor], *, name: str) -> Tensor:
    try:
        return torch.stack(tensors)
    except RuntimeError as error:
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        raise TaskError(
            "examples of different shapes cannot be stacked: {name} has {shapes}",
            name=name,
            shapes=shapes[:3],
            hint="pad them to the same length in your dataset, and do not count the padding in what loss() returns",
        ) from error
