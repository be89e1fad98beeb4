"""Addresses and names from anybody: they become safe, or one error says why not."""

import os
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuadrilla.data.catalogue import resolve
from cuadrilla.data.download import MAX_NAME, safe_name
from cuadrilla.data.record import RECORD
from cuadrilla.errors import ConfigError

EVIL = st.text(alphabet=st.sampled_from('./\\:\0\n aZ%2eñ\u202e\ud800*?"<>|~$'), max_size=40)


@given(st.text(max_size=300) | EVIL)
@example("source.json")
@example("..")
@example("a" * 300 + ".parquet")
def test_a_name_stays_in_its_folder(text):
    name = safe_name(text)
    assert name == os.path.basename(name)
    assert not set(name) & set('/\\:*?"<>|')
    assert name not in ("", ".", "..")
    assert not name.startswith(".")
    assert name.lower() != RECORD.lower()
    assert len(name) <= MAX_NAME + 21
    assert all(unicodedata.category(character)[0] != "C" for character in name)


def test_names_keep_what_they_can():
    assert safe_name("/a/b/Año 1.txt") == "Año 1.txt"
    assert safe_name("..\\..\\x.txt") == "x.txt"
    assert safe_name("ñ" * 300 + ".parquet").endswith("ñ.parquet")


def test_what_is_no_address():
    for bad in ("hf:a", "hf:../..", "hf:a/b c", "hf:", "gopher://a/b"):
        with pytest.raises(ConfigError):
            resolve(bad)
