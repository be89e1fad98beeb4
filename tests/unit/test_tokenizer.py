"""The tokenizer: exact, deterministic, and without special tokens from the text."""

import hashlib
import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuadrilla.data.tokenizer import END_OF_TEXT, MIN_VOCAB, Tokenizer
from cuadrilla.errors import DataError

TEXTS = [f"El niño número {n} comió {n} piñas; ¿y la niña? También, según dijo." for n in range(50)]
SMALL = Tokenizer.train(TEXTS, vocab_size=400)


@given(st.text())
@example("a" * 50_000)
@example("\0\r\n\t \u2028n\u0303" + "🙂" * 100)
@example(END_OF_TEXT * 3)
def test_every_text_comes_back_exactly(text):
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert SMALL.end_of_text not in ids


def test_the_same_texts_in_any_order_give_the_same_bytes(tmp_path):
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    assert Tokenizer.train(shuffled, vocab_size=400).sha256() == SMALL.sha256()
    SMALL.save(tmp_path / "tokenizer.json")
    assert hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest() == SMALL.sha256()


def test_a_text_with_few_merges_gives_a_smaller_vocabulary():
    assert Tokenizer.train([], vocab_size=5000).vocab_size == MIN_VOCAB


def foreign(tmp_path, **changes):
    """A tokenizer.json of 'another model': ours with some keys changed."""
    SMALL.save(tmp_path / "tokenizer.json")
    value = json.loads((tmp_path / "tokenizer.json").read_text())
    path = tmp_path / "foreign.json"
    path.write_text(json.dumps({**value, **changes}))
    return path


def test_truncation_padding_and_dropout_of_a_foreign_tokenizer_are_off(tmp_path):
    model = json.loads(foreign(tmp_path).read_text())["model"]
    path = foreign(
        tmp_path,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": END_OF_TEXT,
        },
        model={**model, "dropout": 0.9},
    )
    assert Tokenizer.load(path).encode_batch(TEXTS) == [SMALL.encode(text) for text in TEXTS]


@pytest.mark.parametrize("normalizers", [[], [{"type": "Sequence", "normalizers": []}]])
def test_steps_that_do_nothing_are_no_reason_to_refuse_it(tmp_path, normalizers):
    """Published tokenizers have them (DeepSeek's)."""
    path = foreign(tmp_path, normalizer={"type": "Sequence", "normalizers": normalizers})
    assert Tokenizer(path.read_bytes()).encode_batch(TEXTS) == SMALL.encode_batch(TEXTS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "loses or changes text"),
        ({"normalizer": {"type": "NFC"}}, "loses or changes text"),
        ({"decoder": None}, "loses or changes text"),
        ({"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "no end-of-text token"),
        ({"model": {"type": "Nonsense"}}, "not a tokenizer.json"),
    ],
)
def test_a_tokenizer_that_would_harm_the_text_is_refused(tmp_path, changes, reason):
    path = foreign(tmp_path, **changes)
    with pytest.raises(DataError, match=reason) as caught:
        Tokenizer(path.read_bytes(), name=str(path))
    assert "foreign.json" in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_a_broken_file_is_refused(tmp_path, raw):
    with pytest.raises(DataError):
        Tokenizer(raw)
    with pytest.raises(DataError):
        Tokenizer.load(tmp_path / "missing.json")
