"""Held-out loss and samples; for models of the built-in stories also how many of their stories are right."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cuadrilla.config import TOP_P, SampleSection
from cuadrilla.data import cuentos
from cuadrilla.data.loader import collate, to_device
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.model.generate import generate_batch, generate_text
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import LanguageTask, not_training, wins
from cuadrilla.model.sampling import Sampling
from cuadrilla.model.task import Task
from cuadrilla.train.precision import Precision

EVALUATION_BATCH = 16


def evaluate(
    task: Task, model: nn.Module, *, sequences: int = 0, device: torch.device, precision: Precision
) -> dict[str, float]:
    """The task's own measures over so many held-out sequences (0: all), spread evenly; {} without held-out data."""
    dataset = task.data("val")
    total = len(dataset)
    if total == 0:
        return {}
    count = min(sequences or total, total)
    chosen = np.linspace(0, total - 1, count).round().astype(np.int64)

    def batches() -> Iterator[dict[str, Tensor]]:
        for first in range(0, count, EVALUATION_BATCH):
            yield to_device(collate([dataset[int(i)] for i in chosen[first : first + EVALUATION_BATCH]]), device)

    with not_training(model), torch.no_grad(), precision.around(model, device):
        return task.evaluate(model, batches())


def sample(task: Task, model: nn.Module, *, section: SampleSection, seed: int) -> str:
    """A continuation of `section.prompt`; "" for tasks that are not about text or when samples are off."""
    if not isinstance(task, LanguageTask) or not section.tokens:
        return ""
    sampling = Sampling(temperature=section.temperature, top_p=TOP_P, max_tokens=section.tokens, seed=seed)
    assert isinstance(model, GPT2)
    return section.prompt + "".join(generate_text(model, task.tokenizer, section.prompt, sampling=sampling))


def judge_stories(
    model: GPT2, tokenizer: Tokenizer, *, num_stories: int, num_pairs: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Have the model write stories, as `generate` does by default, and check them. Have it choose in minimal pairs of
    seed 1, which are never trained on.

    `stories_right`, `pairs_right`: parts in [0, 1]. `faults`: number of stories by the kind of their first fault.
    """
    end = tokenizer.end_of_text
    most, stops = model.config.context, (end,)
    sampling = Sampling(temperature=temperature, top_p=TOP_P, max_tokens=most, stop_ids=stops, seed=seed)
    stories = generate_batch(model, [[end]] * num_stories, sampling=sampling)
    texts = [tokenizer.decode(story).strip() for story in stories]
    found = [cuentos.check(text) for text in texts]
    pairs = list(cuentos.minimal_pairs(num_pairs, seed=1))
    return {
        "stories": num_stories,
        "stories_right": sum(not problems for problems in found) / max(num_stories, 1),
        "faults": dict(Counter(problems[0].kind for problems in found if problems).most_common()),
        "pairs": num_pairs,
        "pairs_right": sum(wins(model, tokenizer, pairs)) / len(pairs) if pairs else 0.0,
        "examples": [text for text, problems in zip(texts, found, strict=True) if not problems][:3],
    }
