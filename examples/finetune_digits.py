"""Fine-tuning: a CNN that knows digits learns, in seconds, to tell odd from even.

`pretrained.safetensors`, in the folder of MNIST's files, is the model of a run of mnist_cnn.py
(checkpoints/v*/model.safetensors). Its layers are frozen, but for a new last one: frozen parameters stay on their
machine and are never changed.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mnist_cnn import Digits, mnist_10k
from mnist_data import Examples
from safetensors.torch import load_file
from torch import Tensor, nn

from cuadrilla.errors import DataError
from cuadrilla.model.task import Batch, TaskDefaults


class OddOrEven:
    defaults = TaskDefaults(length=1)

    def __init__(self, digits: Digits, *, pretrained: Path) -> None:
        self.digits, self.pretrained = digits, pretrained
        if not pretrained.exists():
            raise DataError(
                f"{pretrained} does not exist",
                hint="train mnist.toml in another folder, and copy its newest checkpoints/v*/model.safetensors here",
            )

    def model(self) -> nn.Module:
        model = self.digits.model()
        assert isinstance(model, nn.Sequential)
        model.load_state_dict(load_file(self.pretrained))  # strict: a file of another model is an error
        model.requires_grad_(False)
        model[-1] = nn.Linear(128, 2)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return self.digits.loss(model, self._odd(batch))

    def data(self, split: Literal["train", "val"]) -> Examples:
        return self.digits.data(split)

    def data_hash(self) -> str:
        """With the file in it, no machine can take part that has another one."""
        return self.digits.data_hash() + hashlib.sha256(self.pretrained.read_bytes()).hexdigest()

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        return self.digits.evaluate(model, (self._odd(batch) for batch in batches))

    def _odd(self, batch: Batch) -> Batch:
        return {**batch, "digit": batch["digit"] % 2}


def odd_or_even(data: Path) -> OddOrEven:
    return OddOrEven(mnist_10k(data), pretrained=data / "pretrained.safetensors")
