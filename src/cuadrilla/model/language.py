"""The built-in task: a GPT-2 language model on a data folder, and measures of how well it knows the language.

The inputs of item i of a split are the tokens i*context .. (i+1)*context; its targets are the same window one token
further. So an epoch predicts every token but the first once. An end-of-text token closes each document.

Teachers are models that were trained before and do not change. With teachers, a part of the training loss is the
cross-entropy with the mean of their probabilities. The loss on held-out text does not contain that part.
"""

import hashlib
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cuadrilla.config import ModelSection
from cuadrilla.data.cuentos import MinimalPair
from cuadrilla.data.folder import TOKENIZER, Manifest, open_tokens, read_manifest
from cuadrilla.data.loader import Dataset
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import load_hf, require_rows
from cuadrilla.model.task import Batch, TaskDefaults
from cuadrilla.model.weights import WEIGHTS
from cuadrilla.rundir import file_sha256

NATS_PER_BIT = math.log(2)


class Sequences:
    """A stream of tokens, cut into sequences of `context` tokens. An incomplete last sequence is not used."""

    def __init__(self, tokens: NDArray[Any], *, context: int) -> None:
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return max(len(self._tokens) - 1, 0) // self._context

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        tokens = np.asarray(self._tokens[index * self._context :][: self._context + 1], dtype=np.int64)
        return {"ids": tokens[:-1], "targets": tokens[1:]}


class LanguageTask:
    """Trains on a prepared data folder. Its manifest gives the size of the vocabulary, `model` gives the other sizes.

    `teachers` are folders in Hugging Face's layout. They are read when the first loss is computed. Raises DataError.
    """

    def __init__(self, folder: Path, *, model: ModelSection, teachers: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._teacher_folders = tuple(teachers)
        self.manifest: Manifest = read_manifest(folder)
        self._section = model
        if model.vocab:
            require_rows(self.manifest.vocab_size, rows=model.vocab)
        *_, context = model.shape
        not_matrices = ("transformer.wte.", "transformer.wpe.")
        self.defaults = TaskDefaults(length=context, max_length=context, not_matrices=not_matrices)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / TOKENIZER, sha256=self.manifest.tokenizer_sha256)

    def model(self) -> GPT2:
        model = GPT2(shape_of(self._section, tokens=self.manifest.vocab_size))
        model.recompute = self._section.gradient_checkpointing
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Sum of the cross-entropies in nats, and the number of predicted tokens. Every target counts."""
        assert isinstance(model, GPT2)
        for teacher in self._teachers:
            teacher.to(batch["ids"].device).compute_dtype = model.compute_dtype
        return model.loss(batch["ids"], batch["targets"], teachers=self._teachers), batch["targets"].numel()

    @cached_property
    def _teachers(self) -> list[GPT2]:
        return [load_hf(folder).requires_grad_(False).eval() for folder in self._teacher_folders]

    def data(self, split: Literal["train", "val"]) -> Dataset:
        """The sequences of a split. The split `val` may be missing; it is empty then."""
        if split == "val" and not self.manifest.num_held_out:
            return Sequences(np.empty(0, dtype=np.int64), context=self.defaults.length)
        return Sequences(open_tokens(self.folder, split), context=self.defaults.length)

    def data_hash(self) -> str:
        if not self._teacher_folders:
            return self.manifest.hash()
        files = [folder / name for folder in self._teacher_folders for name in (WEIGHTS, "config.json")]
        try:
            parts = [self.manifest.hash(), *map(file_sha256, files)]
        except OSError as error:
            raise DataError(
                "cannot read the teacher {path}: {reason}",
                path=error.filename,
                reason=error.strerror,
                hint="it belongs to the run: restore it",
            ) from error
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        """`text_measures` of the held-out text."""
        assert isinstance(model, GPT2)
        split = self.manifest.splits["val"]
        return text_measures(model, batches, tokens_per_byte=split.num_tokens / split.num_bytes)


def shape_of(section: ModelSection, *, tokens: int) -> GPT2Config:
    """The model that a run file's section `model` describes. `tokens` is its vocabulary unless the section sets one."""
    layers, heads, width, context = section.shape
    return GPT2Config(
        vocab_size=section.vocab or tokens,
        context=context,
        layers=layers,
        heads=heads,
        width=width,
        dropout=section.dropout,
        exact_gelu=section.exact_gelu,
    )


def text_measures(model: GPT2, batches: Iterator[Batch], *, tokens_per_byte: float) -> dict[str, float]:
    """`loss` is in nats per token. `bits_per_byte` is per byte of UTF-8, and so comparable between tokenizers. Both
    have a standard error over sequences, as `mean_and_error` says.

    `tokens_per_byte`: of the whole text, because the bytes of single tokens are not known here. So the conversion is
    exact if the batches hold the whole text. End-of-text counts as a token without bytes.
    """
    losses: list[float] = []  # of each sequence: mean nats per token
    with torch.no_grad():
        for batch in batches:
            losses += model.losses(batch["ids"], batch["targets"]).cpu().double().mean(1).tolist()
    if not losses:
        raise DataError("there is no held-out text to evaluate on", hint="prepare the data with a larger val split")
    found, scale = mean_and_error("loss", losses), tokens_per_byte / NATS_PER_BIT
    return found | {name.replace("loss", "bits_per_byte"): value * scale for name, value in found.items()}


def mean_and_error(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean as NAME. If it is finite and of two or more values, its standard error as NAME_error."""
    found = {name: statistics.fmean(values)}
    if len(values) > 1 and math.isfinite(found[name]):
        found[f"{name}_error"] = statistics.stdev(values) / math.sqrt(len(values))
    return found


@contextmanager
def not_training(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for the block, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def log_likelihood(model: GPT2, ids: Sequence[int]) -> float:
    """Log-probability (nats) of all tokens but the first. Raises DataError if they do not fit the context."""
    if len(ids) - 1 > model.config.context:
        raise DataError(
            "a text of {tokens} tokens does not fit the model's context of {context}",
            tokens=len(ids) - 1,
            context=model.config.context,
            hint="use shorter texts, or a model with a longer context",
        )
    ids_1T = torch.tensor([ids], device=next(model.parameters()).device)
    return -model.losses(ids_1T[:, :-1], ids_1T[:, 1:]).cpu().double().sum().item()


def wins(model: GPT2, tokenizer: Tokenizer, pairs: Sequence[MinimalPair]) -> list[float]:
    """For each pair: 1 if the model gives `good` the higher probability, 0 if `bad`, 0.5 for a tie.

    The log-probabilities of whole texts are compared. An end-of-text token precedes each, as at a document's beginning.
    """
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    with not_training(model):
        found = [log_likelihood(model, [tokenizer.end_of_text, *ids]) for ids in tokenizer.encode_batch(texts)]
    return [(good > bad) + 0.5 * (good == bad) for good, bad in zip(found[::2], found[1::2], strict=True)]
