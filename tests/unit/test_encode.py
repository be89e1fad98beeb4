"""Encoders give the ids of `tokenizers`, or are not used; what a tokenizer costs a text."""

import json
import sys
import types
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from cuadrilla.data import words
from cuadrilla.data.cuentos import stories
from cuadrilla.data.encode import FAST, PLAIN, WORDS, choose_encoder, flat, make_encoder
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


@cache
def small_tokenizer():
    return Tokenizer.train(stories(200, seed=0), vocab_size=600)


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def test_the_fast_encoder_gives_the_same_ids(tokenizer):
    pytest.importorskip("gigatoken")
    expected = tokenizer.encode_batch(TEXTS)
    assert [list(ids) for ids in make_encoder(tokenizer, FAST)(TEXTS)] == expected
    name, note = choose_encoder(tokenizer, wanted="auto", sample=TEXTS)
    assert name == FAST
    assert f"{sum(map(len, expected)):,} ids" in note


def test_words_that_are_remembered_give_the_same_ids(tokenizer, monkeypatch):
    expected = tokenizer.encode_batch(TEXTS)
    encode = make_encoder(tokenizer, WORDS)
    assert [list(ids) for ids in encode(TEXTS)] == expected
    assert [list(ids) for ids in encode(TEXTS)] == expected
    monkeypatch.setattr(words, "MAX_CACHED", 30)
    encode = make_encoder(tokenizer, WORDS)
    for _ in range(2):
        for text, ids in zip(TEXTS, expected, strict=True):
            assert list(encode([text])[0]) == ids


@given(
    st.text(
        alphabet=st.sampled_from("aeñÑªº1²½ \t\n\r\u00a0'’«».,-_\u00ad\u2014stvrelmd€ǆ\u024f\u0301🙂太\x85\u2028"),
        max_size=40,
    )
)
def test_splitting_is_that_of_the_library(text):
    """Ids of the 256 bytes and little more: all that a difference in the pieces could change is a merge across them."""
    tokenizer = small_tokenizer()
    assert list(make_encoder(tokenizer, WORDS)([text])[0]) == tokenizer.encode(text)
    pieces = [piece for piece, _ in RawTokenizer.from_buffer(tokenizer.json()).pre_tokenizer.pre_tokenize_str(text)]
    mine = words.WordEncoder(tokenizer)._pieces(text)
    if mine is not None:
        assert len(mine) == len(pieces)
        assert "".join(mine) == text


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"pre_tokenizer": None},
    ],
)
def test_words_are_not_used_for_a_tokenizer_that_splits_otherwise(tokenizer, change):
    assert words.suits(tokenizer)
    changed = types.SimpleNamespace(json=lambda: json.dumps({**json.loads(tokenizer.json()), **change}).encode())
    assert not words.suits(changed)
    with pytest.raises(ConfigError, match="splits as GPT-2"):
        make_encoder(changed, WORDS)


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
    assert name == WORDS
    assert "gigatoken gives other ids" in note
    with pytest.raises(ConfigError, match="other ids"):
        choose_encoder(tokenizer, wanted=FAST, sample=TEXTS)


def test_without_the_library_another_encoder_is_used_and_said(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    name, note = choose_encoder(tokenizer, wanted="auto", sample=TEXTS)
    assert name == WORDS
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
