"""Records, TEI and packed files: real files, made here, read as a preparation reads them."""

import bz2
import gzip
import json
import lzma
import sys
import tracemalloc
import zlib

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet as pq

from cuadrilla.data import sources
from cuadrilla.errors import DataError, EnvironmentProblem
from tests.reading import find, texts

TEXT = "El niño comió más piñas en la montaña, según contó María.\n\n¿Qué haría él? «Nada», dijo.\n" * 30
PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def put(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# -- packed files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACK)
def test_a_packed_text_is_detected_like_a_plain_one(tmp_path, packing):
    for encoding in ("latin-1", "utf-16"):
        raw = TEXT.encode(encoding)
        plain = find(put(tmp_path / "a.txt", raw)).all[0]
        path = put(tmp_path / f"a.txt{packing}", PACK[packing](raw))
        packed = find(path).all[0]
        assert (packed.encoding, packed.num_bytes, packed.name) == (plain.encoding, len(TEXT.encode()), path.name)
        assert texts(path) == [TEXT]


@pytest.mark.parametrize("packing", PACK)
def test_streams_one_after_another_are_read_and_damage_is_not_an_end(tmp_path, packing):
    one, two = PACK[packing](b"uno\n" * 999), PACK[packing](b"dos\n" * 999)
    path = put(tmp_path / f"a.md{packing}", one + two)
    assert texts(path) == ["uno\n" * 999 + "dos\n" * 999]
    flipped = bytearray(one)
    flipped[len(one) // 2] ^= 0xFF
    for damaged in (one[:-1], one + two[:-1], one + two[: len(two) // 2], bytes(flipped), b"no"):
        put(path, damaged)
        with pytest.raises(DataError, match=r"a\.md\.\w+ cannot be read: "):
            texts(path)


def bomb(num_bytes):
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(b"a " * 2**19) for _ in range(num_bytes >> 20)) + packer.flush()


def test_what_unpacks_to_more_than_the_limit_is_refused_and_is_never_held_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_UNPACKED_BYTES", 2**26)
    for name, packed in (("a.txt.gz", bomb(2**27)), ("a.txt.zst", PACK[".zst"](b"a " * 2**26))):
        with pytest.raises(DataError, match=" unpacks to more than 67,108,864 bytes"):
            find(put(tmp_path / name, packed))
    put(tmp_path / "b.txt.gz", bomb(2**26))
    tracemalloc.start()
    try:
        find(tmp_path / "b.txt.gz")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


# -- JSON Lines --------------------------------------------------------------------------------------------------------


def line(**fields):
    return json.dumps(fields, ensure_ascii=False).encode()


def test_each_line_is_a_text(tmp_path):
    path = put(
        tmp_path / "a.jsonl",
        b"\xef\xbb\xbf" + b"\r\n".join([line(text="año\nnuevo", id=1), b"", b"  ", line(text=""), line(text="dos")]),
    )
    assert texts(path) == ["año\nnuevo", "", "dos"]
    (source,) = find(path).all
    assert (source.name, source.num_bytes) == ("a.jsonl", len("año\nnuevodos".encode()))
    assert texts(put(tmp_path / "b.NDJSON", line(cuerpo="hola")), field="cuerpo") == ["hola"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"id": 7, "body": "x"}', "no text in a field 'text' (it has: 'id', 'body')"),
        (b'{"text": null}', "no text in a field 'text'"),
        (b'["text"]', "no text in a field 'text'"),
        (b'{"text": "\xf1"}', "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "not JSON"),
    ],
)
def test_a_record_without_text_is_counted_and_a_file_of_them_is_an_error(tmp_path, bad, said):
    path = put(tmp_path / "a.jsonl", line(text="uno") + b"\n" + bad + b"\n" + line(text="tres") + b"\n")
    assert find(path).counts == {"records_without_text": 1}
    assert texts(path) == ["uno", "tres"]
    put(path, b"\n" + bad)
    with pytest.raises(DataError) as caught:
        find(path)
    assert f"{path}:2: {said}" in caught.value.message
    assert "--field" in caught.value.hint


# -- Parquet -----------------------------------------------------------------------------------------------------------


def table(path, values, *, name="text", type=None, **options):
    pq.write_table(pa.table({"id": list(range(len(values))), name: pa.array(values, type=type)}), path, **options)
    return path


@pytest.mark.parametrize(
    ("type", "options"),
    [
        (pa.string(), {}),
        (pa.large_string(), {"row_group_size": 7, "compression": "zstd"}),
        (pa.dictionary(pa.int32(), pa.string()), {"data_page_version": "2.0"}),
    ],
)
def test_each_cell_of_the_column_is_a_text(tmp_path, type, options):
    values = [f"texto número {number % 9}" for number in range(600)]
    path = table(tmp_path / "a.parquet", values, type=type, **options)
    assert texts(path) == values
    assert find(path).all[0].num_bytes == sum(len(value.encode()) for value in values)


def test_another_column_and_what_is_no_column_of_text(tmp_path):
    path = table(tmp_path / "a.parquet", ["uno", "dos"], name="cuerpo")
    assert texts(path, field="cuerpo") == ["uno", "dos"]
    with pytest.raises(DataError, match=r"no column 'text' of text \(it has: 'id', 'cuerpo'\)") as caught:
        find(path)
    assert "--field" in caught.value.hint
    for values in ([["a"]], [b"a"], [1]):
        with pytest.raises(DataError, match="no column 'text' of text"):
            find(table(tmp_path / "b.parquet", values))
    assert find(table(tmp_path / "b.parquet", ["uno", None])).counts == {"records_without_text": 1}


def test_damaged_parquet_is_an_error(tmp_path):
    path = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": ["uno"] * 100}), path)
    raw = path.read_bytes()
    for data in (b"", raw[:-1], raw[:4] + bytes(60) + raw[64:], b"x" * 99 + b"PAR1"):
        put(path, data)
        with pytest.raises(DataError, match=r"b\.parquet cannot be read"):
            find(path)


def test_without_the_extra_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    table(tmp_path / "a.parquet", ["uno"])
    put(tmp_path / "a.txt.zst", PACK[".zst"](b"uno"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what an import that fails looks like
    for name in ("a.parquet", "a.txt.zst"):
        with pytest.raises(EnvironmentProblem) as caught:
            texts(tmp_path / name)
        assert caught.value.message == f"reading {(tmp_path / name).suffix} needs pyarrow, which is not installed"
        assert caught.value.hint == 'pip install "cuadrilla[data]"'
