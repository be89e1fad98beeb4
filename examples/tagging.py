"""Sequence tagging with a bidirectional GRU: a tag for every word. `task.path` chooses the data:

tagging.py:people   built-in stories; is the word part of a person's name? Held out: stories about other people
tagging.py:conllu   parts of speech from train.conllu and val.conllu in the folder `task.data` (Universal Dependencies)
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from tagging_data import LENGTH, PADDING, Sentences, conllu_sentences, story_sentences
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cuadrilla.model.task import Batch, TaskDefaults

WORDS = 2**14  # places for words: their hashes, so that no vocabulary has to be agreed on


class Tagger(nn.Module):
    def __init__(self, num_tags: int) -> None:
        super().__init__()
        self.word, self.shape = nn.Embedding(WORDS, 64), nn.Embedding(4, 8)
        self.unknown = nn.Dropout1d(0.3)  # whole words: so that it learns to do without knowing them
        self.gru = nn.GRU(72, 64, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, num_tags)

    def forward(self, word: Tensor, shape: Tensor) -> Tensor:
        words = self.unknown(self.word(word % WORDS))
        hidden: Tensor = self.gru(torch.cat([words, self.shape(shape)], dim=-1))[0]
        tags: Tensor = self.head(hidden)
        return tags


class Tagging:
    defaults = TaskDefaults(length=LENGTH)

    def __init__(self, train: Sentences, val: Sentences) -> None:
        self.splits = {"train": train, "val": val}

    def model(self) -> nn.Module:
        return Tagger(len(self.splits["train"].tags))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Sentences have unequal lengths: what counts is words, not sentences."""
        tags = model(batch["word"], batch["shape"]).flatten(0, 1).float()
        wanted = batch["tag"].flatten()
        return cross_entropy(tags, wanted, ignore_index=PADDING, reduction="sum"), int((wanted != PADDING).sum())

    def data(self, split: Literal["train", "val"]) -> Sentences:
        return self.splits[split]

    def data_hash(self) -> str:
        return hashlib.sha256(b"".join(split.raw() for split in self.splits.values())).hexdigest()

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        loss, right, count = 0.0, 0, 0
        for batch in batches:
            total, words = self.loss(model, batch)
            found = model(batch["word"], batch["shape"]).argmax(-1)
            loss, right, count = loss + float(total), right + int((found == batch["tag"]).sum()), count + words
        return {"loss": loss / count, "accuracy": right / count}


def people() -> Tagging:
    return Tagging(*story_sentences())


def conllu(data: Path) -> Tagging:
    return Tagging(*conllu_sentences(data))
