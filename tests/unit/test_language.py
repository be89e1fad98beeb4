"""The language task on a small data folder: sequences, loss, bits per byte, minimal pairs."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cuadrilla.config import ModelSection
from cuadrilla.data.folder import TOKENS, Manifest, Split, write_manifest
from cuadrilla.data.loader import collate
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError, TaskError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import LanguageTask, log_likelihood
from cuadrilla.model.task import Task

CONTEXT = 8
TEXTS = {"train": ["la niña come pan", "el niño come pan y queso"] * 5, "val": ["la niña come queso"] * 3}
SECTION = ModelSection(layers=1, heads=2, width=16, context=CONTEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer.train(TEXTS["train"], vocab_size=270)
    tokenizer.save(folder / "tokenizer.json")
    splits = {}
    for name, texts in TEXTS.items():
        tokens = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.end_of_text)]
        np.array(tokens, dtype="<u2").tofile(folder / TOKENS[name])
        num_bytes = sum(len(text.encode()) for text in texts)
        splits[name] = Split(num_tokens=len(tokens), num_bytes=num_bytes, num_documents=len(texts), sha256="")
    manifest = Manifest(
        tokenizer_sha256=tokenizer.sha256(),
        vocab_size=tokenizer.vocab_size,
        dtype="uint16",
        end_of_text=tokenizer.end_of_text,
        splits=splits,
    )
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def task(folder: Path) -> LanguageTask:
    return LanguageTask(folder, model=SECTION)


def model_of(task: LanguageTask) -> GPT2:
    torch.manual_seed(0)
    return task.model().eval()


def whole_split(task: LanguageTask, split: str) -> list[int]:
    ids = []
    for text in TEXTS[split]:
        ids += [*task.tokenizer.encode(text), task.tokenizer.end_of_text]
    return ids


def test_it_is_a_task_with_the_vocabulary_of_its_data(task: LanguageTask) -> None:
    assert isinstance(task, Task)
    model = model_of(task)
    assert model.config.vocab_size == task.tokenizer.vocab_size == task.manifest.vocab_size
    assert (model.config.layers, model.config.heads, model.config.width, model.config.context) == (1, 2, 16, 8)
    assert task.defaults.length == CONTEXT
    assert task.data_hash() == task.manifest.hash()
    for_adamw = [name for name, _ in model.named_parameters() if name.startswith(task.defaults.not_matrices)]
    assert for_adamw == ["transformer.wte.weight", "transformer.wpe.weight"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_sequences_predict_every_token_once(task: LanguageTask, split: str) -> None:
    data, ids = task.data(split), whole_split(task, split)
    assert len(data) == (len(ids) - 1) // CONTEXT
    items = [data[number] for number in range(len(data))]
    assert np.concatenate([item["ids"] for item in items]).tolist() == ids[: len(data) * CONTEXT]
    assert np.concatenate([item["targets"] for item in items]).tolist() == ids[1 : len(data) * CONTEXT + 1]
    assert items[0]["ids"].dtype == np.int64
    for index in (len(data), -1):
        with pytest.raises(IndexError):
            data[index]


def test_items_are_mappings() -> None:
    with pytest.raises(TaskError, match="is a tuple, not a mapping"):
        collate([(1, 2)])  # as many datasets of PyTorch have it


def test_loss_is_a_sum_and_counts_tokens(task: LanguageTask) -> None:
    model, data = model_of(task), task.data("train")
    one, two = collate([data[0]]), collate([data[0], data[1]])
    loss, count = task.loss(model, two)
    first, second = task.loss(model, one)[0], task.loss(model, collate([data[1]]))[0]
    assert count == 2 * CONTEXT
    assert loss.item() == pytest.approx(first.item() + second.item(), rel=1e-6)
    assert loss.requires_grad


def test_held_out_measures_and_how_sure_they_are(task: LanguageTask) -> None:
    """The standard error is over sequences and does not depend on batches; for a single sequence there is none."""
    model, data = model_of(task), task.data("val")
    items = [data[number] for number in range(len(data))]
    losses = [model.loss(batch["ids"], batch["targets"]).item() / CONTEXT for batch in map(collate, zip(items))]
    num_tokens, num_bytes = len(whole_split(task, "val")), len("".join(TEXTS["val"]).encode())
    ratio, error = num_tokens / num_bytes / math.log(2), np.std(losses, ddof=1) / math.sqrt(len(losses))
    measures = task.evaluate(model, iter([collate(items[:2]), collate(items[2:])]))
    assert measures == {
        "loss": pytest.approx(np.mean(losses), rel=1e-6),
        "bits_per_byte": pytest.approx(np.mean(losses) * ratio, rel=1e-6),
        "loss_error": pytest.approx(error, rel=1e-4),
        "bits_per_byte_error": pytest.approx(error * ratio, rel=1e-4),
    }
    assert "loss_error" not in task.evaluate(model, iter([collate(items[:1])]))


def test_log_likelihood_is_that_of_all_tokens_but_the_first(task: LanguageTask) -> None:
    model = model_of(task)
    for ids in ([3, 9, 4], [5, 8, 6, 2, 7, 11, 13], [1, 2]):
        log_p = torch.log_softmax(model(torch.tensor([ids[:-1]]))[0].double(), -1)
        expected = sum(log_p[place, token].item() for place, token in enumerate(ids[1:]))
        assert log_likelihood(model, ids) == pytest.approx(expected, rel=1e-5)
    assert log_likelihood(model, [4]) == 0.0
    with pytest.raises(DataError, match="context of 8"):
        log_likelihood(model, [1] * (CONTEXT + 2))
