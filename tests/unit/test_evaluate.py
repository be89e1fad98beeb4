"""Measures that compare models, against sums by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cuadrilla.cli.evaluate import read_texts
from cuadrilla.data import cuentos
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.train import evaluate as e

CONTEXT = 16
SENTENCE = "la niña come pan y el niño bebe agua"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([SENTENCE] * 4, vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> GPT2:
    """A model that has memorised SENTENCE."""
    torch.manual_seed(0)
    made = GPT2(GPT2Config(vocab_size=tokenizer.vocab_size, context=CONTEXT, layers=1, heads=2, width=32))
    ids = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(SENTENCE)]])
    assert ids.shape[1] <= CONTEXT + 1
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        made.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    return made.eval()


def measured(model: GPT2, tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, float]:
    return e.evaluate_texts(model, tokenizer, texts, device=torch.device("cpu"))


def nats_by_hand(model: GPT2, ids: Sequence[int]) -> float:
    """The mean over all tokens but the first, each predicted from those before it."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return -sum(float(log_p[place, token]) for place, token in enumerate(ids[1:])) / (len(ids) - 1)


def test_bits_per_byte_are_those_of_the_packed_documents(
    model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents follow each other, each with end-of-text, in sequences of the context; only text has bytes."""
    monkeypatch.setattr(e, "TEXTS_PER_BATCH", 2)
    texts = [SENTENCE, "ñandú 🙂 " * 30, "x"]
    ids = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.end_of_text)]
    cuts = range(0, len(ids), CONTEXT)
    losses = [nats_by_hand(model, ids[i : j + 1]) for i, j in pairwise(cuts) if j < len(ids)]
    assert len(losses) == (len(ids) - 1) // CONTEXT
    found, ratio = measured(model, tokenizer, texts), len(ids) / len("".join(texts).encode()) / math.log(2)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    for name in ("", "_error"):
        assert found[f"bits_per_byte{name}"] == pytest.approx(found[f"loss{name}"] * ratio)


def test_a_short_text_is_one_sequence_and_no_text_is_refused(model: GPT2, tokenizer: Tokenizer) -> None:
    loss = nats_by_hand(model, [*tokenizer.encode("el pan"), tokenizer.end_of_text])
    found = measured(model, tokenizer, ["el pan"])
    assert found == {"loss": pytest.approx(loss, rel=1e-5), "bits_per_byte": found["bits_per_byte"]}
    for nothing in ([], [""]):
        with pytest.raises(DataError, match="no held-out text"):
            measured(model, tokenizer, nothing)


def test_pairs_have_a_standard_error(model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = cuentos.MinimalPair("", SENTENCE, "la niño come pan y el niña bebe agua", "agreement")
    swapped = replace(pair, good=pair.bad, bad=pair.good)
    monkeypatch.setattr(cuentos, "minimal_pairs", lambda num, **_: [pair, pair, pair, swapped] * num)
    found = e.judge_pairs(model, tokenizer, num=100)
    assert found["pairs_right"] == 0.75
    assert found["pairs_right_error"] == pytest.approx((0.75 * 0.25 / 400) ** 0.5, rel=0.01)


def test_texts_are_decoded_and_cleaned_as_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("Año uno. \r\n\r\n\r\nDos.".encode("cp1252"))
    assert read_texts(tmp_path / "t.txt") == ["Año uno.\n\nDos."]
