"""Figures that compare models, against sums by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuadrilla.data.cuentos import MinimalPair
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.train.eval_metrics import cut_windows, pair_figure, read_texts, text_figure

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


def bits_by_hand(model: GPT2, ids: list[int], *, new: int) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return -sum(float(logits[place - 1, ids[place]]) for place in range(len(ids) - new, len(ids))) / math.log(2)


@pytest.mark.parametrize("length", [1, 2, 17, 18, 25, 41, 100])
def test_every_token_but_the_first_is_predicted_once(length: int) -> None:
    ids = list(range(length))
    windows = list(cut_windows(ids, context=CONTEXT))
    assert [token for window, new in windows for token in window[-new:]] == ids[1:]
    assert all(len(window) <= CONTEXT + 1 and new < len(window) for window, new in windows)
    assert all(len(window) - new >= CONTEXT // 2 for window, new in windows[1:])


def test_bits_per_byte_are_the_sum_over_windows(model: GPT2, tokenizer: Tokenizer) -> None:
    texts = [SENTENCE, "ñandú 🙂 " * 30, "x"]
    figure = text_figure(model, tokenizer, texts, of="textos")
    expected = sum(
        bits_by_hand(model, window, new=new)
        for text in texts
        for window, new in cut_windows([tokenizer.end_of_text, *tokenizer.encode(text)], context=CONTEXT)
    )
    assert figure.total == pytest.approx(expected, rel=1e-5)
    assert figure.count == sum(len(text.encode()) for text in texts)
    assert figure.value == figure.total / figure.count
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low < figure.value < figure.high


def test_the_known_text_costs_less_and_one_window_has_no_interval(model: GPT2, tokenizer: Tokenizer) -> None:
    known = text_figure(model, tokenizer, [SENTENCE], of="a")
    unknown = text_figure(model, tokenizer, ["el pan bebe niña"], of="b")
    assert known.value < 0.2 < unknown.value
    assert (known.low, known.high) == (None, None)
    with pytest.raises(DataError, match="no text"):
        text_figure(model, tokenizer, [], of="nada")


def test_pairs_have_a_count_and_an_interval(model: GPT2, tokenizer: Tokenizer) -> None:
    pair = MinimalPair("", SENTENCE, "la niño come pan y el niña bebe agua", "agreement")
    swapped = replace(pair, good=pair.bad, bad=pair.good)
    figure = pair_figure(model, tokenizer, [pair] * 4, of="p")
    assert (figure.value, figure.total, figure.count, figure.low) == (1.0, 4.0, 4, 1.0)
    mixed = pair_figure(model, tokenizer, [pair, pair, pair, swapped] * 100, of="p")
    error = 1.96 * (0.75 * 0.25 / 400) ** 0.5
    assert (mixed.low, mixed.value, mixed.high) == pytest.approx((0.75 - error, 0.75, 0.75 + error), abs=0.005)


def test_texts_are_decoded_and_cleaned_as_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("Año uno. \r\n\r\n\r\nDos.".encode("cp1252"))
    assert list(read_texts(tmp_path / "t.txt")) == ["Año uno.\n\nDos."]
