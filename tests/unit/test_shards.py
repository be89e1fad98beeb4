"""Shards and manifest: what is written comes back; what is damaged is named."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuadrilla.data import shards
from cuadrilla.data.shards import Manifest, Portion, Shard, ShardWriter, Source, Split, TokenStream
from cuadrilla.errors import DataError, ResourceError

pytestmark = pytest.mark.unit

HASH = hashlib.sha256(b"").hexdigest()
counts = st.integers(0, 2**63 - 1)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


@st.composite
def splits(draw, name):
    sizes = draw(st.lists(st.integers(1, 2**40), max_size=3))
    files = [Shard(name=f"{name}-{n:05d}.bin", num_tokens=size, sha256=draw(hashes)) for n, size in enumerate(sizes)]
    return Split(num_tokens=sum(sizes), num_bytes=draw(counts), num_documents=draw(counts), shards=tuple(files))


portions = st.builds(Portion, num_documents=counts, num_characters=counts, num_bytes=counts, num_tokens=counts)
sources = st.builds(
    Source,
    name=text,
    sha256=hashes,
    num_bytes=counts,
    encoding=text,
    licence=text,
    portions=st.dictionaries(st.sampled_from(["train", "val"]), portions),
)
manifests = st.builds(
    Manifest,
    tokenizer_sha256=hashes,
    vocab_size=st.integers(1, 2**32),
    dtype=st.sampled_from(["uint16", "uint32"]),
    end_of_text=counts,
    splits=st.fixed_dictionaries({"train": splits("train"), "val": splits("val")}),
    sources=st.lists(sources, max_size=3).map(tuple),
    counts=st.dictionaries(text, st.integers(-(2**63), 2**63 - 1)),
    options=st.dictionaries(
        text, text | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    ),
)


@given(manifest=manifests)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
def test_a_manifest_comes_back_equal(tmp_path, manifest):
    shards.write_manifest(tmp_path, manifest)
    again = shards.read_manifest(tmp_path)
    assert again == manifest
    assert again.hash() == manifest.hash()


def make(folder, *, sizes=None, dtype="uint16", shard_tokens=10):
    """A data folder with tokens 0, 1, 2...; returns its manifest."""
    made = {}
    for split, size in (sizes or {"train": 35, "val": 4}).items():
        writer = ShardWriter(folder, split=split, dtype=dtype, shard_tokens=shard_tokens)
        for start in range(0, size, 7):
            writer.append(list(range(start, min(size, start + 7))))
        made[split] = Split(num_tokens=size, num_bytes=size, num_documents=1, shards=writer.close())
        assert writer.num_tokens == size
    (folder / shards.TOKENIZER).write_bytes(b"")
    manifest = Manifest(tokenizer_sha256=HASH, vocab_size=300, dtype=dtype, end_of_text=0, splits=made)
    shards.write_manifest(folder, manifest)
    return manifest


def test_the_hash_changes_with_any_content(tmp_path):
    manifest = make(tmp_path)
    assert replace(manifest, vocab_size=301).hash() != manifest.hash()
    assert replace(manifest, counts={"x": 1}).hash() != manifest.hash()


@pytest.mark.parametrize(("vocab", "dtype"), [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_the_type_follows_from_the_vocabulary(vocab, dtype):
    assert shards.dtype_for(vocab) == dtype


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_shards_read_as_one_stream(tmp_path, dtype):
    manifest = make(tmp_path, dtype=dtype)
    assert [shard.num_tokens for shard in manifest.splits["train"].shards] == [10, 10, 10, 5]
    stream = TokenStream.open(tmp_path, "train")
    assert len(stream) == 35
    for start in range(36):
        for count in range(36 - start):
            tokens = stream.read(start, count)
            assert tokens.dtype == np.int64
            assert tokens.tolist() == list(range(start, start + count))
    for start, count in ((-1, 2), (34, 2), (36, 0), (0, -1)):
        with pytest.raises(IndexError):
            stream.read(start, count)


def test_files_are_little_endian_and_nothing_else_is_left(tmp_path):
    make(tmp_path)
    assert (tmp_path / "train-00001.bin").read_bytes() == np.arange(10, 20, dtype="<u2").tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        *(f"train-{n:05d}.bin" for n in range(4)),
        "val-00000.bin",
    ]


def test_a_token_that_does_not_fit_is_our_own_bug(tmp_path):
    with pytest.raises(AssertionError):
        ShardWriter(tmp_path, split="train", dtype="uint16").append([65_536])


@pytest.mark.parametrize("damage", ["truncate", "grow", "remove"])
def test_a_shard_of_another_length_is_named_at_once(tmp_path, damage):
    make(tmp_path)
    path = tmp_path / "train-00002.bin"
    raw = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes(raw[:-1] if damage == "truncate" else raw + b"\0")
    with pytest.raises(DataError, match=r"train-00002\.bin"):
        TokenStream.open(tmp_path, "train")
    TokenStream.open(tmp_path, "val")


def test_one_flipped_bit_is_found_on_request(tmp_path):
    manifest = make(tmp_path)
    path = tmp_path / "train-00002.bin"
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    TokenStream.open(tmp_path, "train")
    for check in (lambda: shards.verify_folder(tmp_path, manifest, hashes=True),):
        with pytest.raises(DataError, match=r"train-00002\.bin is not what"):
            check()


def test_another_tokenizer_is_found(tmp_path):
    manifest = make(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not what"):
        shards.verify_folder(tmp_path, manifest, hashes=False)


def test_an_empty_split_is_an_error_that_says_so(tmp_path):
    make(tmp_path, sizes={"train": 5, "val": 0})
    for split in ("val", "test"):
        with pytest.raises(DataError, match=f"no {split} text"):
            TokenStream.open(tmp_path, split)


def edit(folder, change):
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda value: value.update(schema=99), "another version"),
        (lambda value: value.pop("schema"), "schema"),
        (lambda value: value.pop("dtype"), "dtype"),
        (lambda value: value.update(dtype="int8"), "dtype"),
    ],
)
def test_a_broken_or_newer_manifest_is_refused(tmp_path, change, reason):
    make(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(DataError, match=reason):
        shards.read_manifest(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_no_json_object_is_refused(tmp_path, raw):
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError, match=r"manifest\.json"):
        shards.read_manifest(tmp_path)


def test_a_folder_without_manifest_is_not_a_data_folder(tmp_path):
    make(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match="not a finished data folder"):
        TokenStream.open(tmp_path, "train")
    with pytest.raises(DataError, match="does not exist") as caught:
        shards.read_manifest(tmp_path / "nowhere")
    assert "data prepare" in caught.value.hint


def test_publishing_replaces_every_old_shard(tmp_path):
    make(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    work = tmp_path / ".work"
    work.mkdir()
    manifest = make(work, sizes={"train": 8, "val": 2})
    shards.publish(work, tmp_path, manifest)
    assert shards.read_manifest(tmp_path) == manifest
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"manifest.json", "tokenizer.json", "train-00000.bin", "val-00000.bin", "notes.txt", ".work"}


def test_a_publication_that_fails_midway_leaves_a_folder_that_is_refused(tmp_path):
    make(tmp_path)
    work = tmp_path / ".work"
    work.mkdir()
    manifest = make(work)
    (work / "train-00002.bin").unlink()
    with pytest.raises(ResourceError):
        shards.publish(work, tmp_path, manifest)
    with pytest.raises(DataError, match="not a finished data folder"):
        shards.read_manifest(tmp_path)
