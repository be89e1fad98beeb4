"""The folder of a download: its record, the files of others, and the state after a crash or full disk."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.record import RECORD
from cuadrilla.errors import DataError, ResourceError
from tests.conftest import SMALL_DISK_BYTES
from tests.downloader import TEXT, THIRD, Downloader
from tests.reading import find
from tests.web import chunked, fixed, whole


def test_nothing_of_others_is_overwritten(server, pull):
    pull.folder.mkdir()
    (pull.folder / "a.txt").write_text("mine")
    url = server.on("/a.txt", whole(TEXT))
    with pytest.raises(DataError, match=r"holds a\.txt, which did not come from"):
        pull(url)
    (pull.folder / RECORD).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        pull(url)
    assert (pull.folder / "a.txt").read_text() == "mine"
    assert server.seen == []


def archive(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return data.getvalue()


def test_the_texts_of_an_archive(server, pull):
    files = {f"repo/{name}": name.encode() for name in (
        "txt/a.txt", "txt/b.txt", "x.txt", "txt/more/a.txt", "txt/.DS_Store", f"txt/{RECORD}", "txt/..", "txt/c?|:.txt",
    )}  # fmt: skip
    url = server.on("/main.zip", whole(archive(files)))
    for _ in range(2):
        assert pull(url, name="main.zip", inside="txt")
        assert pull.names() == {"a.txt", "b.txt", "c___.txt", RECORD}
        assert (pull.folder / "b.txt").read_bytes() == b"txt/b.txt"
        assert pull.record.files["b.txt"] == hashlib.sha256(b"txt/b.txt").hexdigest()
        assert not pull(url, name="main.zip", inside="txt")
        (pull.folder / "b.txt").unlink()  # as if it had ended between the record and the last rename


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04 nothing", "not a zip file"),
        (archive({"repo/txt/a.txt": b"uno" * 99}).replace(b"uno", b"due", 1), "Bad CRC-32"),
        (archive({"repo/tei/a.txt": b"uno"}), "no folder txt"),
    ],
)
def test_a_broken_archive_leaves_nothing(server, pull, content, reason):
    url = server.on("/main.zip", fixed(200, content), whole(archive({"repo/txt/a.txt": b"uno"})))
    with pytest.raises(DataError, match=reason):
        pull(url, name="main.zip", inside="txt")
    assert pull.names() == set()
    assert pull(url, name="main.zip", inside="txt")


def licences(folder: Path) -> dict[str, str]:
    return {source.name.rpartition("/")[2]: source.licence for source in find(folder).all}


def test_licences_reach_the_manifest(server, pull, tmp_path):
    book = "".join(f"Capítulo {number}. El niño comió {number} piñas en la montaña.\n\n" for number in range(200))
    files = {"repo/txt/a.txt": book.encode(), "repo/txt/c.txt": b"uno"}
    pull(server.on("/main.zip", whole(archive(files))), name="main.zip", licence="PDM 1.0", inside="txt")
    (pull.folder / "mine.txt").write_text("mío")
    expected = {"a.txt": "PDM 1.0", "c.txt": "PDM 1.0", "mine.txt": "unknown"}
    assert licences(pull.folder) == expected
    (pull.folder / "c.txt").write_text("another text")
    assert licences(pull.folder) == expected | {"c.txt": "unknown"}

    options = PrepareOptions(vocab=300, val_fraction=0.1)
    given = str(pull.folder / "a.txt")
    first = prepare([given], out=tmp_path / "data", options=options).manifest
    assert [source.licence for source in first.sources] == ["PDM 1.0"]
    (pull.folder / RECORD).write_text((pull.folder / RECORD).read_text().replace('"date": "', '"date": "1'))
    assert prepare([given], out=tmp_path / "later", options=options).manifest.hash() == first.hash()


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"url": "x", "files": []}'])
def test_a_record_of_others_says_nothing(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    (tmp_path / "a.txt").write_text("hola")
    assert licences(tmp_path) == {"a.txt": "unknown"}


def test_what_a_kill_leaves(server, pull):
    (pull.folder / ".get").mkdir(parents=True)
    (pull.folder / ".get" / "a.txt").write_bytes(TEXT[:THIRD])
    assert pull(server.on("/a.txt", whole(TEXT)))
    assert (pull.folder / "a.txt").read_bytes() == TEXT
    assert pull.names() == {"a.txt", RECORD}


def test_a_full_disk(server, small_disk):
    pull = Downloader(small_disk / "corpus")
    big = bytes(range(1, 256)) * (SMALL_DISK_BYTES // 255 + 1)
    with pytest.raises(ResourceError, match="No space left"):
        pull(server.on("/unknown.txt", chunked(big)))
    assert pull.names() == set()
    assert pull(server.on("/small.txt", whole(TEXT)))
    assert (pull.folder / "a.txt").read_bytes() == TEXT
