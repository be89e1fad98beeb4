"""Held-out loss and samples; for language models also the loss on any text, and the test of the built-in stories."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cuadrilla.config import TOP_P, SampleSection
from cuadrilla.data import cuentos
from cuadrilla.data.loader import Dataset, collate, to_device
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.model.generate import generate_batch, generate_text
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import LanguageTask, Sequences, mean_and_error, not_training, text_measures, wins
from cuadrilla.model.sampling import Sampling
from cuadrilla.model.task import Task
from cuadrilla.train.precision import Precision

EVALUATION_BATCH, TEXTS_PER_BATCH = 16, 256


def evaluate(
    task: Task, model: nn.Module, *, sequences: int = 0, device: torch.device, precision: Precision
) -> dict[str, float]:
    """The task's own measures over so many held-out sequences (0: all), spread evenly; {} without held-out data."""
    dataset = task.data("val")
    total = len(dataset)
    if total == 0:
        return {}
    chosen = np.linspace(0, total - 1, min(sequences or total, total)).round().astype(np.int64).tolist()
    with not_training(model), torch.no_grad(), precision.around(model, device):
        return task.evaluate(model, _batches(dataset, chosen, device=device))


def evaluate_texts(
    model: GPT2, tokenizer: Tokenizer, texts: Sequence[str], *, device: torch.device
) -> dict[str, float]:
    """The measures of a language task on these documents, packed and cut into sequences like a data folder's. Less text
    than the context is one sequence. Raises DataError if there is none.
    """
    parts = [tokenizer.packed(texts[i : i + TEXTS_PER_BATCH]) for i in range(0, len(texts), TEXTS_PER_BATCH)]
    tokens = np.concatenate([np.empty(0, dtype=np.uint32), *parts])
    num_bytes = sum(len(text.encode()) for text in texts)
    sequences = Sequences(tokens, context=max(1, min(model.config.context, len(tokens) - 1)))
    with not_training(model):
        batches = _batches(sequences, range(len(sequences)), device=device)
        return text_measures(model, batches, tokens_per_byte=len(tokens) / max(1, num_bytes))


def _batches(dataset: Dataset, chosen: Sequence[int], *, device: torch.device) -> Iterator[dict[str, Tensor]]:
    for first in range(0, len(chosen), EVALUATION_BATCH):
        yield to_device(collate([dataset[i] for i in chosen[first : first + EVALUATION_BATCH]]), device)


def sample(task: Task, model: nn.Module, *, section: SampleSection, seed: int) -> str:
    """A continuation of `section.prompt`; "" for tasks that are not about text or when samples are off."""
    if not isinstance(task, LanguageTask) or not section.tokens:
        return ""
    sampling = Sampling(temperature=section.temperature, top_p=TOP_P, max_tokens=section.tokens, seed=seed)
    assert isinstance(model, GPT2)
    return section.prompt + "".join(generate_text(model, task.tokenizer, section.prompt, sampling=sampling))


def write_stories(model: GPT2, tokenizer: Tokenizer, *, num: int) -> list[str]:
    """Have the model write so many texts from the beginning, as `generate` does by default."""
    end = tokenizer.end_of_text
    sampling = Sampling(temperature=0.8, top_p=TOP_P, max_tokens=model.config.context, stop_ids=(end,), seed=0)
    return [tokenizer.decode(ids).strip() for ids in generate_batch(model, [[end]] * num, sampling=sampling)]


def judge_stories(texts: Sequence[str]) -> dict[str, Any]:
    """`stories_right`: the part of the texts that are right as built-in stories. `faults`: the number of texts by the
    kind of their first fault."""
    found = [cuentos.fault_of(text) for text in texts]
    faults = Counter(filter(None, found))
    right = mean_and_error("stories_right", [float(fault is None) for fault in found])
    return {**right, "faults": dict(faults.most_common())}


def judge_pairs(model: GPT2, tokenizer: Tokenizer, *, num: int) -> dict[str, float]:
    """`pairs_right`: how often the model finds the correct text of a minimal pair likelier. The pairs are of a seed
    that no training uses."""
    return mean_and_error("pairs_right", wins(model, tokenizer, list(cuentos.minimal_pairs(num, seed=1))))
