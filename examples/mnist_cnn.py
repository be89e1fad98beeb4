"""A small CNN on handwritten digits. `task.path` in the run file chooses the images:

mnist_cnn.py:mnist       MNIST: 60,000 images to train on, 10,000 held out; downloaded once, 12 MB
mnist_cnn.py:mnist_10k   the latter only, 8,000 of them to train on; 1.7 MB
mnist_cnn.py:digits      1,797 coarser digits that come with scikit-learn

`data` is what `task.data` names, on the machine that calls the function: MNIST's folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
from mnist_data import FOLDER, Examples, load, load_sklearn
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cuadrilla.model.task import Batch, TaskDefaults

Row = Annotated[list[Annotated[float, Field(ge=0, le=255)]], Field(min_length=28, max_length=28)]


class Image(BaseModel):
    """What `cuadrilla serve` takes: 28 rows of 28 pixels, 0 black, 255 white."""

    image: Annotated[list[Row], Field(min_length=28, max_length=28)]


class Guess(BaseModel):
    """What it gives."""

    digit: int
    probability: float


class Digits:
    defaults = TaskDefaults(length=1)  # an example counts as one token

    def __init__(self, train: Examples, val: Examples) -> None:
        self.splits = {"train": train, "val": val}

    def model(self) -> nn.Module:
        first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]  # 28 x 28 -> 14 x 14
        second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]  # -> 7 x 7
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        logits = model(batch["image"].unsqueeze(1) / 255)
        return cross_entropy(logits, batch["digit"], reduction="sum"), len(logits)

    def data(self, split: Literal["train", "val"]) -> Examples:
        return self.splits[split]

    def data_hash(self) -> str:
        return " ".join(examples.sha256() for examples in self.splits.values())

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        loss, right, count = 0.0, 0, 0
        for batch in batches:
            logits = model(batch["image"].unsqueeze(1) / 255)
            loss += float(cross_entropy(logits, batch["digit"], reduction="sum"))
            right += int((logits.argmax(1) == batch["digit"]).sum())
            count += len(logits)
        return {"loss": loss / count, "accuracy": right / count}

    def predict(self, model: nn.Module, inputs: list[Image]) -> list[Guess]:
        device = next(model.parameters()).device
        images = torch.tensor([one.image for one in inputs], device=device)
        best = model(images.unsqueeze(1) / 255).float().softmax(1).max(1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Guess(digit=digit, probability=probability) for digit, probability in pairs]


def mnist(data: Path = FOLDER) -> Digits:
    return Digits(load("train", folder=data), load("t10k", folder=data))


def mnist_10k(data: Path = FOLDER) -> Digits:
    return Digits(*load("t10k", folder=data).split(8000))


def digits(_data: Path = FOLDER) -> Digits:
    return Digits(*load_sklearn().split(1500))
