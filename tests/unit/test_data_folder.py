"""Tokens and manifest: what is written comes back; what is damaged is named."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from cuadrilla.data import folder as module
from cuadrilla.data.folder import TOKENS, Manifest, Source, Split, open_tokens
from cuadrilla.errors import DataError

HASH = hashlib.sha256(b"").hexdigest()


def make(folder, *, sizes=None, dtype="uint16"):
    """A data folder with tokens 0, 1, 2...; returns its manifest."""
    made = {}
    for split, size in (sizes or {"train": 35, "val": 4}).items():
        np.arange(size, dtype=np.dtype(dtype).newbyteorder("<")).tofile(folder / TOKENS[split])
        made[split] = Split(num_tokens=size, num_bytes=size, num_documents=1, sha256=HASH)
    (folder / module.TOKENIZER).write_bytes(b"")
    manifest = Manifest(tokenizer_sha256=HASH, vocab_size=300, dtype=dtype, end_of_text=0, splits=made)
    module.write_manifest(folder, manifest)
    return manifest


def test_a_manifest_comes_back_equal_and_its_hash_changes_with_any_content(tmp_path):
    source = Source(
        name="año/\u2028🙂 \"x\".txt", sha256=HASH, num_bytes=2**63, encoding="cp1252, utf-8", licence="",
        documents={"train": 2**40},
    )  # fmt: skip
    manifest = replace(make(tmp_path), sources=(source,), counts={"x": -1}, options={"a": 0.1, "b": "ñ", "c": 1})
    module.write_manifest(tmp_path, manifest)
    again = module.read_manifest(tmp_path)
    assert again == manifest
    assert again.hash() == manifest.hash()
    for change in ({"vocab_size": 301}, {"counts": {"x": 1}}, {"sources": ()}):
        assert replace(manifest, **change).hash() != manifest.hash()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_come_back(tmp_path, dtype):
    make(tmp_path, dtype=dtype)
    assert open_tokens(tmp_path, "train").tolist() == list(range(35))
    assert open_tokens(tmp_path, "val").tolist() == list(range(4))


def test_tokens_of_another_length_are_named_at_once(tmp_path):
    make(tmp_path)
    path = tmp_path / "train.bin"
    raw = path.read_bytes()
    for damaged in (raw[:-1], raw + b"\0", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"train\.bin"):
            open_tokens(tmp_path, "train")
        open_tokens(tmp_path, "val")


def test_an_empty_split_is_an_error_that_says_so(tmp_path):
    make(tmp_path, sizes={"train": 5, "val": 0})
    for split in ("val", "test"):
        with pytest.raises(DataError, match=f"no {split} text"):
            open_tokens(tmp_path, split)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"schema": 99}', "another version"),
        (b"{}", "schema"),
        (b'{"schema": 2, "dtype": "int8"}', "dtype"),
        *((raw, r"manifest\.json cannot be read") for raw in (b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000)),
    ],
)
def test_a_manifest_that_is_broken_or_of_another_version_is_refused(tmp_path, raw, reason):
    (tmp_path / module.MANIFEST).write_bytes(raw)
    with pytest.raises(DataError, match=reason):
        module.read_manifest(tmp_path)
