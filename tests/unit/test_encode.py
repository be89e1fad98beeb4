"""Encoders give the ids of `tokenizers`, or are not used; what a tokenizer costs a text."""

import sys
import types

import pytest

from cuadrilla.data.cuentos import stories
from cuadrilla.data.encode import FAST, PLAIN, choose_encoder, flat, make_encoder
from cuadrilla.data.fertility import fit
from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.errors import ConfigError

pytestmark = pytest.mark.unit

TEXTS = [
    *stories(50, seed=1),
    "",
    " ",
    "\n\n\t  \r\n",
    f"un texto que dice {END_OF_TEXT} y sigue",
    "¿Qué año? «1605», n\u0303 ñ \u00a0 🙂 ½ ² 太初 \u200b \x00 \u2028 it's don't",
    "x" * 5000 + " " * 300 + "ñ" * 2000,
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(stories(200, seed=0), vocab_size=600)


def test_the_fast_encoder_gives_the_same_ids(tokenizer):
    pytest.importorskip("gigatoken")
    expected = tokenizer.encode_batch(TEXTS)
    assert [list(ids) for ids in make_encoder(tokenizer, FAST)(TEXTS)] == expected
    name, note = choose_encoder(tokenizer, wanted="auto", sample=TEXTS)
    assert name == FAST
    assert f"{sum(map(len, expected)):,} ids" in note


def test_an_encoder_with_other_ids_is_not_used(tokenizer, monkeypatch):
    """A library that disagrees in the last document only."""

    class Disagreeing:
        @staticmethod
        def from_json(_json):
            return Disagreeing()

        def encode_batch_list(self, texts, *, parallel):
            assert not parallel
            found = tokenizer.encode_batch(texts)
            return [*found[:-1], found[-1][:-1]]

    monkeypatch.setitem(sys.modules, "gigatoken", types.SimpleNamespace(Tokenizer=Disagreeing))
    name, note = choose_encoder(tokenizer, wanted="auto", sample=TEXTS)
    assert name == PLAIN
    assert "gigatoken gives different ids" in note
    with pytest.raises(ConfigError, match="different ids"):
        choose_encoder(tokenizer, wanted=FAST, sample=TEXTS)


def test_without_the_library_another_encoder_is_used_and_said(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    name, note = choose_encoder(tokenizer, wanted="auto", sample=TEXTS)
    assert name == PLAIN
    assert "not installed" in note
    assert choose_encoder(tokenizer, wanted=PLAIN, sample=TEXTS)[0] == PLAIN
    with pytest.raises(ConfigError, match="not installed") as caught:
        choose_encoder(tokenizer, wanted=FAST, sample=TEXTS)
    assert "cuadrilla[fast]" in caught.value.hint


def test_ids_in_one_array():
    ids, lengths = flat([[1, 2], [], [70000]], dtype="uint32")
    assert ids.tolist() == [1, 2, 70000]
    assert lengths.tolist() == [2, 0, 1]


def test_fertility_by_hand():
    tokenizer = Tokenizer.train(["la casa la casa la casa la casa"], vocab_size=264)
    found = fit(tokenizer, "la casa, la X", name="own")
    costs = {word: len(tokenizer.encode(f" {word}")) for word in ("la", "casa", "X")}
    assert costs["la"] == 1
    assert costs["X"] == 2
    assert found.num_words == 4
    assert found.tokens_per_word == round((2 * costs["la"] + costs["casa"] + costs["X"]) / 4, 3)
    assert found.words_split == (costs["casa"] > 1) / 4 + 1 / 4
    assert found.bytes_per_token == round(13 / len(tokenizer.encode("la casa, la X")), 3)
