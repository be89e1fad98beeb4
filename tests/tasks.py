"""Small tasks for tests: real models that train in milliseconds, on examples of unequal weight."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cuadrilla.model.task import TaskDefaults

NUM_EXAMPLES = 997


class Examples:
    """y = sin of a linear projection. The loss of each example counts 0 to 3 times, as its `count` says."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.x = random.standard_normal((NUM_EXAMPLES, 12)).astype(np.float32)
        self.y = np.sin(self.x @ np.linspace(-1, 1, 12, dtype=np.float32))[:, None].astype(np.float32)
        self.count = random.integers(0, 4, NUM_EXAMPLES)

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return {"x": self.x[index], "y": self.y[index], "count": self.count[index : index + 1]}


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RaggedRegression:
    """An MLP on examples of unequal weight, so that a mean of the workers' means would be wrong."""

    defaults = TaskDefaults(length=1)

    def __init__(self, *, dropout: float = 0.0, width: int = 48, dtype: torch.dtype = torch.float32) -> None:
        self.dropout = dropout
        self.width = width
        self.dtype = dtype
        self.num_losses = 0

    def model(self) -> nn.Module:
        middle = [nn.Linear(self.width, self.width), nn.GELU(), nn.Dropout(self.dropout)]
        return nn.Sequential(nn.Linear(12, self.width), nn.GELU(), *middle, nn.Linear(self.width, 1)).to(self.dtype)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        self.num_losses += torch.is_grad_enabled()
        weight = batch["count"].to(self.dtype)
        difference = model(batch["x"].to(self.dtype)) - batch["y"]
        return (difference.square() * weight).sum(), int(batch["count"].sum())

    def data(self, split: Literal["train", "val"]) -> Examples:
        return Examples(0 if split == "train" else 1)

    def data_hash(self) -> str:
        return hashlib.sha256(self.data("train").x.tobytes()).hexdigest()

    def evaluate(self, model: nn.Module, batches: Iterator[Mapping[str, Tensor]]) -> dict[str, float]:
        sums = [self.loss(model, batch) for batch in batches]
        return {"loss": float(sum(loss for loss, _ in sums)) / sum(count for _, count in sums)}


class HugeExamples(RaggedRegression):
    """One example of fifty is ten thousand times larger, so that a worker that computes one sends an outlier."""

    def data(self, split: Literal["train", "val"]) -> Examples:
        examples = super().data(split)
        if split == "train":
            examples.y[::50] *= 1e4
        return examples


class Rescaled(RaggedRegression):
    """From the loss number `after` on, losses are `factor` times as large. Each counted token counts `tokens` times."""

    def __init__(self, factor: float, *, after: int = 0, tokens: int = 1) -> None:
        super().__init__()
        self.factor, self.after, self.tokens = factor, after, tokens

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return (loss * self.factor if self.num_losses >= self.after else loss), count * self.tokens


class Normalised(RaggedRegression):
    """A model with running statistics. Those of its first layer depend only on the data, so a test can compute them.

    The layer before a BatchNorm has no bias. Its gradient would be zero except for rounding, which AdamW amplifies.
    """

    def model(self) -> nn.Module:
        hidden = [nn.Linear(12, self.width, bias=False), nn.BatchNorm1d(self.width, momentum=None), nn.GELU()]
        return nn.Sequential(nn.BatchNorm1d(12, affine=False), *hidden, nn.Linear(self.width, 1))


class FrozenBeginning(RaggedRegression):
    """Fine-tuning: the first layer is frozen."""

    def model(self) -> nn.Module:
        model = super().model()
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        return model
