"""The folder of a download: its hashes and records, the files of others, and the state after a crash or full disk."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from cuadrilla.data import download
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.record import RECORD
from cuadrilla.errors import DataError, LinkError, ResourceError
from tests.conftest import SMALL_DISK_BYTES
from tests.downloader import OTHER, TEXT, THIRD, Downloader
from tests.reading import find
from tests.web import chunked, fixed, whole


def test_hashes(server, pull):
    sha256 = hashlib.sha256(TEXT).hexdigest()
    url = server.on("/a.txt", whole(TEXT))
    with pytest.raises(DataError, match=f"has SHA-256 {sha256}"):
        pull(url, sha256="0" * 64)
    assert pull.names() == set()
    assert pull(url, sha256=sha256).records[0].sha256 == sha256


def test_nothing_of_others_is_overwritten(server, pull):
    pull.folder.mkdir()
    (pull.folder / "a.txt").write_text("mine")
    with pytest.raises(DataError, match="did not come from"):
        pull(server.on("/a.txt", whole(TEXT)))
    pull(server.on("/one/b.txt", whole(TEXT)))
    with pytest.raises(DataError, match="did not come from"):
        pull(server.on("/two/b.txt", whole(OTHER)))
    assert (pull.folder / "a.txt").read_text() == "mine"
    assert (pull.folder / "b.txt").read_bytes() == TEXT
    (pull.folder / RECORD).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        pull(server.url("/two/b.txt"))


def archive(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return data.getvalue()


def test_the_texts_of_an_archive(server, pull):
    url = server.on(
        "/main.zip", whole(archive({"repo/txt/a.txt": b"uno", "repo/txt/b.txt": b"dos", "repo/x.txt": b"x"}))
    )
    pull(url, inside="txt")
    assert pull.names() == {"a.txt", "b.txt", RECORD}
    assert pull(url, inside="txt").already
    (pull.folder / "b.txt").unlink()  # as if it had ended between the record and the last rename
    assert not pull(url, inside="txt").already
    assert (pull.folder / "b.txt").read_bytes() == b"dos"
    other = server.on("/other.zip", whole(archive({"repo/txt/b.txt": b"tres"})))
    with pytest.raises(DataError, match="did not come from"):
        pull(other, inside="txt")
    broken = server.on(
        "/broken.zip", fixed(200, b"PK\x03\x04 nothing", ETag='"one"'), whole(archive({"r/txt/c.txt": b"c"}))
    )
    with pytest.raises(DataError, match="cannot be unpacked"):
        pull(broken, inside="txt")
    pull(broken, inside="txt")  # the broken archive was not kept
    alike = server.on("/alike.zip", whole(archive({"repo/txt/d?.txt": b"uno", "repo/txt/d*.txt": b"dos"})))
    with pytest.raises(DataError, match="two of its files are called d_"):
        pull(alike, inside="txt")
    assert pull.names() == {"a.txt", "b.txt", "c.txt", RECORD}
    assert (pull.folder / "b.txt").read_bytes() == b"dos"


def licences(folder: Path) -> dict[str, str]:
    return {source.name.rpartition("/")[2]: source.licence for source in find(folder).all}


def test_licences_reach_the_manifest(server, pull, tmp_path):
    book = "".join(f"Capítulo {number}. El niño comió {number} piñas en la montaña.\n\n" for number in range(200))
    pull(server.on("/a.txt", whole(book.encode())), licence="CC0 1.0")
    pull(server.on("/main.zip", whole(archive({"repo/txt/c.txt": b"uno"}))), licence="PDM 1.0", inside="txt")
    pull(server.on("/kept.zip", whole(archive({"e.txt": b"tres"}))), licence="CC BY 4.0")
    (pull.folder / "mine.txt").write_text("mío")
    expected = {"a.txt": "CC0 1.0", "c.txt": "PDM 1.0", "kept.zip": "CC BY 4.0", "mine.txt": "unknown"}
    assert licences(pull.folder) == expected
    (pull.folder / "c.txt").write_text("another text")
    assert licences(pull.folder) == expected | {"c.txt": "unknown"}

    options = PrepareOptions(vocab=300, val_fraction=0.1)
    given = str(pull.folder / "a.txt")
    first = prepare([given], out=tmp_path / "data", options=options).manifest
    assert [source.licence for source in first.sources] == ["CC0 1.0"]
    (pull.folder / RECORD).write_text((pull.folder / RECORD).read_text().replace('"date": "', '"date": "1'))
    assert prepare([given], out=tmp_path / "later", options=options).manifest.hash() == first.hash()


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"schema": 1, "files": [{"url": "x"}]}'])
def test_a_record_of_others_says_nothing(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    (tmp_path / "a.txt").write_text("hola")
    assert licences(tmp_path) == {"a.txt": "unknown"}


@pytest.mark.parametrize("damage", ["tag", "part"])
def test_what_a_crash_leaves(server, pull, monkeypatch, damage):
    """A partial download begins anew if it is not known of which file it is the beginning."""
    url = server.on("/a.txt", whole(TEXT, after=THIRD))
    with monkeypatch.context() as patch:
        patch.setattr(download, "MAX_TRIES", 1)
        with pytest.raises(LinkError):
            pull(url)
    (part,) = pull.folder.glob(".*.part")
    assert part.stat().st_size == THIRD
    part.with_suffix(f".{damage}").unlink()
    server.seen.clear()
    server.on("/a.txt", whole(TEXT))
    pull(url)
    assert (pull.folder / "a.txt").read_bytes() == TEXT
    assert server.ranges() == [None]
    assert pull.names() == {"a.txt", RECORD}


def test_a_full_disk(server, small_disk, monkeypatch):
    pull = Downloader(small_disk / "corpus", monkeypatch)
    big = bytes(range(1, 256)) * (SMALL_DISK_BYTES // 255 + 1)
    with pytest.raises(ResourceError, match="No space left"):
        pull(server.on("/unknown.txt", chunked(big)))
    assert not (pull.folder / "unknown.txt").exists()
    assert pull(server.on("/small.txt", whole(TEXT))).records[0].num_bytes == len(TEXT)


def test_names_from_the_server(server, pull):
    for number, (header, name) in enumerate(
        (
            ('attachment; filename="../../.ssh/config"', "config"),
            ("attachment; filename*=UTF-8''..%2F..%2F%C3%B1and%C3%BA.txt", "ñandú.txt"),
            ("attachment", "x"),
        )
    ):
        assert pull(server.on(f"/{number}/x", whole(TEXT, Content_Disposition=header))).records[0].name == name
