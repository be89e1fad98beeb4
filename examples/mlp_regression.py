"""Regression with an MLP: 5,000 examples of 20 numbers, a smooth function of them, and a little noise."""

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from cuadrilla.model.task import Batch, TaskDefaults

NOISE = 0.1  # its square, 0.01, is the lowest mean squared error that can be hoped for

Numbers = Annotated[list[float], Field(min_length=20, max_length=20)]


class Examples:
    """Made from a seed, so that every machine has the same."""

    def __init__(self, count: int, *, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.x = random.standard_normal((count, 20)).astype(np.float32)
        y = np.tanh(self.x @ np.linspace(-0.5, 0.5, 20)) + NOISE * random.standard_normal(count)
        self.y = y.astype(np.float32)[:, None]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.float32]]:
        return {"x": self.x[index], "y": self.y[index]}


class Regression:
    defaults = TaskDefaults(length=1)  # an example counts as one token

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])

    def data(self, split: Literal["train", "val"]) -> Examples:
        return Examples(5000, seed=1) if split == "train" else Examples(1000, seed=2)

    def data_hash(self) -> str:
        return "mlp-regression-1"  # a new name whenever Examples makes other data

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        sums = [self.loss(model, batch) for batch in batches]
        return {"loss": sum(float(loss) for loss, _ in sums) / sum(count for _, count in sums)}

    def predict(self, model: nn.Module, inputs: list[Numbers]) -> list[float]:
        """What `cuadrilla serve` is asked for: y of each x."""
        x = torch.tensor(inputs, device=next(model.parameters()).device)
        outputs: list[float] = model(x)[:, 0].float().tolist()
        return outputs


def mlp() -> Regression:
    return Regression()
