"""Tokens and manifest: what is written comes back; what is damaged is named."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from cuadrilla.data import folder as module
from cuadrilla.data.folder import TOKENS, Manifest, Source, TokenWriter, open_tokens
from cuadrilla.errors import DataError, ResourceError

HASH = hashlib.sha256(b"").hexdigest()


def make(folder, *, sizes=None, dtype="uint16"):
    """A data folder with tokens 0, 1, 2...; returns its manifest."""
    made = {}
    for split, size in (sizes or {"train": 35, "val": 4}).items():
        writer = TokenWriter(folder, split=split, dtype=dtype)
        for start in range(0, size, 7):
            writer.append(list(range(start, min(size, start + 7))))
        made[split] = writer.close(num_bytes=size, num_documents=1)
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
def test_tokens_come_back_and_are_little_endian(tmp_path, dtype):
    make(tmp_path, dtype=dtype)
    assert open_tokens(tmp_path, "train").tolist() == list(range(35))
    assert (tmp_path / "train.bin").read_bytes() == np.arange(35, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"manifest.json", "tokenizer.json", *TOKENS.values()}


@pytest.mark.parametrize("damage", ["truncate", "grow", "remove"])
def test_tokens_of_another_length_are_named_at_once(tmp_path, damage):
    make(tmp_path)
    path = tmp_path / "train.bin"
    raw = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes(raw[:-1] if damage == "truncate" else raw + b"\0")
    with pytest.raises(DataError, match=r"train\.bin"):
        open_tokens(tmp_path, "train")
    open_tokens(tmp_path, "val")


def test_one_flipped_bit_is_found_on_request(tmp_path):
    manifest = make(tmp_path)
    path = tmp_path / "train.bin"
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    open_tokens(tmp_path, "train")
    with pytest.raises(DataError, match=r"train\.bin is not what"):
        module.verify_folder(tmp_path, manifest, hashes=True)


def test_an_empty_split_is_an_error_that_says_so(tmp_path):
    make(tmp_path, sizes={"train": 5, "val": 0})
    for split in ("val", "test"):
        with pytest.raises(DataError, match=f"no {split} text"):
            open_tokens(tmp_path, split)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda value: value.update(schema=99), "another version"),
        (lambda value: value.pop("schema"), "schema"),
        (lambda value: value.update(dtype="int8"), "dtype"),
    ],
)
def test_a_broken_or_newer_manifest_is_refused(tmp_path, change, reason):
    make(tmp_path)
    path = tmp_path / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=reason):
        module.read_manifest(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_no_json_object_is_refused(tmp_path, raw):
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError, match=r"manifest\.json"):
        module.read_manifest(tmp_path)


def test_a_folder_without_manifest_is_not_a_data_folder(tmp_path):
    make(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match="not a finished data folder"):
        open_tokens(tmp_path, "train")
    with pytest.raises(DataError, match="does not exist") as caught:
        module.read_manifest(tmp_path / "nowhere")
    assert "data prepare" in caught.value.hint


def test_publishing_replaces_what_the_folder_held_and_nothing_else(tmp_path):
    make(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    work = tmp_path / ".work"
    work.mkdir()
    manifest = make(work, sizes={"train": 8, "val": 2})
    module.publish(work, tmp_path, manifest)
    assert module.read_manifest(tmp_path) == manifest
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"manifest.json", "tokenizer.json", *TOKENS.values(), "notes.txt", ".work"}


def test_a_publication_that_fails_midway_leaves_a_folder_that_is_refused(tmp_path):
    make(tmp_path)
    work = tmp_path / ".work"
    work.mkdir()
    manifest = make(work)
    (work / "val.bin").unlink()
    with pytest.raises(ResourceError):
        module.publish(work, tmp_path, manifest)
    with pytest.raises(DataError, match="not a finished data folder"):
        module.read_manifest(tmp_path)
