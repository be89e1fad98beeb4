"""`cuadrilla data prepare` with records, TEI, packed files and archives, as a user runs it."""

import gzip
import hashlib
import json
import random
import tarfile
import zipfile
from xml.sax.saxutils import escape

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet as pq

from cuadrilla.data.prepare import PrepareOptions, prepare
from tests.inside import cuadrilla

pytestmark = pytest.mark.spawn


def make_books(num_books=3):
    rng = random.Random(0)
    words = [
        "".join(rng.choices(["ca", "ñu", "ló", "pe", "qué", "mar", "güe", "&"], k=rng.randint(1, 4)))
        for _ in range(400)
    ]
    return [
        "\n\n".join(" ".join(rng.choices(words, k=rng.randint(20, 90))) + "." for _ in range(120))
        for _ in range(num_books)
    ]


BOOKS = make_books()


def write_plain(folder):
    for number, book in enumerate(BOOKS):
        (folder / f"{number}.txt").write_text(book, encoding="utf-8")


def write_packed(folder):
    (folder / "0.txt.gz").write_bytes(gzip.compress(BOOKS[0].encode()))
    (folder / "1.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(BOOKS[1].encode("latin-1")))
    (folder / "2.txt").write_text(BOOKS[2], encoding="utf-16")


def write_jsonl(folder):
    lines = "".join(json.dumps({"text": book}) + "\n" for book in BOOKS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def write_parquet(folder):
    pq.write_table(pa.table({"id": [1, 2, 3], "text": BOOKS}), folder / "a.parquet", row_group_size=2)


def write_tei(folder):
    for number, book in enumerate(BOOKS):
        paragraphs = "\n".join(f"<p>{escape(paragraph)}</p>" for paragraph in book.split("\n\n"))
        (folder / f"{number}.xml").write_text(
            f"<TEI><teiHeader>cabecera</teiHeader><text><body>{paragraphs}</body></text></TEI>", encoding="utf-8"
        )


def write_zip(folder):
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number, book in enumerate(BOOKS):
            archive.writestr(f"libros/{number}.txt", book)


def write_tar(folder):
    plain = folder.parent / "members"
    plain.mkdir()
    write_plain(plain)
    with tarfile.open(folder / "a.tar.xz", "w:xz") as archive:
        for path in sorted(plain.iterdir()):
            archive.add(path, path.name)


WRITERS = (write_plain, write_packed, write_jsonl, write_parquet, write_tei, write_zip, write_tar)


def test_the_same_texts_in_any_form_give_the_same_tokens(tmp_path):
    hashes = {}
    for write in WRITERS:
        source = tmp_path / write.__name__ / "text"
        source.mkdir(parents=True)
        write(source)
        out = source.parent / "out"
        manifest = prepare([str(source)], out=out, options=PrepareOptions(vocab=300)).manifest
        assert any(source.documents for source in manifest.sources)
        hashes[write.__name__] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("*.bin"))]
    assert len(hashes["write_plain"]) == 2
    assert set(map(tuple, hashes.values())) == {tuple(hashes["write_plain"])}, hashes


def run(*arguments):
    return cuadrilla("data", "prepare", *map(str, arguments))


def test_records_without_text_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"cuerpo": book}) for book in BOOKS]
    path.write_text("\n".join([*lines, '{"titulo": "x"}', '{"cuerpo": "roto']), encoding="utf-8")
    out = tmp_path / "out"
    stopped = run(path, "--out", out, "--vocab", 300)
    assert stopped.returncode == 4
    assert f"{path}:1: no text in a field 'text' (it has: 'cuerpo')" in stopped.stderr.replace("\n", "")
    assert not out.exists()
    done = run(path, "--out", out, "--field", "cuerpo", "--vocab", 300, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["records_without_text"] == 2
