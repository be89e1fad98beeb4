"""A character model of one's own text: the `.txt` files (UTF-8) in the folder that `task.data` names.

Not a GPT: a GRU, to show that any PyTorch model will do. For a GPT-2 on the same text: `cuadrilla data prepare`.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cuadrilla.errors import DataError
from cuadrilla.model.task import Batch, TaskDefaults

LENGTH, HELD_OUT = 128, 0.05  # characters in an example; the end of the text is held out


class Pieces:
    """The text in pieces of LENGTH + 1 characters: each predicts the next."""

    def __init__(self, codes: NDArray[np.int64]) -> None:
        self.codes = codes

    def __len__(self) -> int:
        return (len(self.codes) - 1) // LENGTH

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        piece = self.codes[index * LENGTH : (index + 1) * LENGTH + 1]
        return {"x": piece[:-1], "y": piece[1:]}


class Characters(nn.Module):
    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, 64)
        self.gru = nn.GRU(64, 256, batch_first=True)
        self.head = nn.Linear(256, num_characters)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.gru(self.embed(x))[0]
        logits: Tensor = self.head(hidden)
        return logits


class OwnText:
    defaults = TaskDefaults(length=LENGTH)

    def __init__(self, text: str) -> None:
        self.text = text
        self.alphabet = sorted(set(text))
        code = {character: number for number, character in enumerate(self.alphabet)}
        codes = np.array([code[character] for character in text], dtype=np.int64)
        cut = int(len(codes) * (1 - HELD_OUT))
        self.splits = {"train": Pieces(codes[:cut]), "val": Pieces(codes[cut:])}

    def model(self) -> nn.Module:
        return Characters(len(self.alphabet))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        logits = model(batch["x"]).flatten(0, 1).float()
        return cross_entropy(logits, batch["y"].flatten(), reduction="sum"), batch["y"].numel()

    def data(self, split: Literal["train", "val"]) -> Pieces:
        return self.splits[split]

    def data_hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        with torch.no_grad():
            sums = [self.loss(model, batch) for batch in batches]
        loss = sum(float(part) for part, _ in sums) / sum(count for _, count in sums)
        return {"loss": loss, "bits_per_character": loss / math.log(2)}


def own_text(data: Path) -> OwnText:
    files = sorted(data.glob("*.txt"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    if len(text) * HELD_OUT < 2 * LENGTH:
        raise DataError(
            f"{data} holds {len(text):,} characters in {len(files)} .txt files",
            hint=f"put at least {int(2 * LENGTH / HELD_OUT):,} characters of text there",
        )
    return OwnText(text)
