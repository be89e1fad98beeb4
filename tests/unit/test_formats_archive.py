"""Zip and tar: members as streams, and every trick of a hostile archive."""

import gzip
import io
import os
import pickle
import stat
import struct
import tarfile
import tracemalloc
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuadrilla.data.formats.archive import MAX_MEMBERS
from cuadrilla.data.sources import open_sources
from cuadrilla.errors import DataError

pytestmark = pytest.mark.unit

TEXT = "El niño comió más piñas en la montaña, según contó María.\n" * 30
KINDS = ("tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "zip")
NOVEL = "<TEI><text><body><p>La novela.</p></body></text></TEI>"
FILES = {
    "repo/a.txt": TEXT.encode(),
    "repo/z/b.txt": TEXT.encode("latin-1"),
    "repo/léeme.md": b"# hola\n    codigo\n",
    "repo/c.jsonl": b'{"text": "uno"}\n{"text": "dos"}\n',
    "repo/novela.xml": NOVEL.encode(),
    "repo/pom.xml": b"<project/>",
    "repo/foto.jpg": b"\xff\xd8",
    "repo/.hidden/x.txt": b"no",
    "__MACOSX/repo/._a.txt": b"\0\5",
    "repo/dentro.zip": b"PK\3\4",
    "repo/dentro.txt.gz": gzip.compress(b"no"),
    "repo/model.pkl": b"\x80\x04",
}


def find(path):
    return open_sources([str(path)], exclude=path.parent / "out", progress=lambda *_: None)


def texts(path):
    sources = pickle.loads(pickle.dumps(find(path).sources))  # noqa: S301
    return {source.name: ["".join(pieces) for pieces in source.texts()] for source in sources}


def pack(path, files, **options):
    """An archive of the kind that its name says."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return path
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}.get(path.suffix, "w")
    with tarfile.open(path, mode, **options) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_each_suffix_are_a_source(tmp_path, kind):
    path = pack(tmp_path / f"corpus.{kind}", FILES)
    name = path.name
    assert texts(path) == {
        f"{name}!*.txt": [TEXT, TEXT],
        f"{name}!repo/c.jsonl": ["uno", "dos"],
        f"{name}!repo/léeme.md": ["# hola\n    codigo\n"],
        f"{name}!repo/novela.xml": ["La novela."],
    }
    found = find(path)
    assert found.counts == {"files_xml_not_tei": 1, "files_not_text": 2, "packed_in_archives": 2}
    assert found.skipped == tuple(
        f"{name}!repo/{skipped}" for skipped in ("dentro.txt.gz", "dentro.zip", "foto.jpg", "model.pkl", "pom.xml")
    )
    plain = found.sources[0]
    assert (plain.encoding, plain.keeps_indentation) == ("iso-8859-1, utf-8", False)
    assert plain.num_bytes == len(TEXT.encode()) + len(TEXT.encode("latin-1"))
    assert [source.keeps_indentation for source in found.sources] == [False, False, True, False]


def test_archives_in_a_folder_are_read_too(tmp_path):
    folder = tmp_path / "libros"
    folder.mkdir()
    pack(folder / "a.zip", {"uno.txt": b"uno"})
    pack(folder / "b.tar.gz", {"x.jpg": b"x"})
    found = find(folder)
    assert [source.name for source in found.sources] == ["libros/a.zip!uno.txt"]
    assert found.skipped == ("libros/b.tar.gz!x.jpg",)


def test_an_archive_without_text_is_an_error(tmp_path):
    for kind in KINDS:
        with pytest.raises(DataError, match="contains no text in an accepted format"):
            find(pack(tmp_path / f"a.{kind}", {"data.pkl": b"\x80\x04.", "model/weights.bin": b"x"}))


def test_an_error_in_a_member_names_it(tmp_path):
    for kind, files, said in [
        ("zip", {"n/a.jsonl": b'{"text": "a"}\n{"text": "b'}, "!n/a.jsonl:2: the last line is cut off"),
        ("tar.gz", {"ok.txt": b"ok", "a.txt": b"\x80\x04\x95"}, "!a.txt is not text but a Python pickle"),
        ("tar", {"a.xml": b"<TEI>"}, "!a.xml:1: not well-formed XML"),
    ]:
        path = pack(tmp_path / f"a.{kind}", files)
        with pytest.raises(DataError) as caught:
            find(path)
        assert caught.value.message.startswith(f"{path}{said}")


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("name", ["/etc/passwd.txt", "../x.txt", "a/../../x.txt", "..\\x.txt", "C:\\x.txt", "C:x.txt"])
def test_a_name_outside_of_the_archive_is_refused(tmp_path, kind, name):
    with pytest.raises(DataError, match="outside of any folder"):
        find(pack(tmp_path / f"a.{kind}", {"a.txt": b"hola", name: b"hola"}))


def test_names_cannot_write_on_the_terminal(tmp_path):
    path = pack(tmp_path / "a.tar", {"Libro I:/\x1b[2Ja\x07.txt": b"hola"})
    assert list(texts(path)) == ["a.tar!Libro I:/\ufffd[2Ja\ufffd.txt"]
    with pytest.raises(DataError, match="a name of 1,504 characters"):
        find(pack(path, {"a" * 1500 + ".txt": b"hola"}))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_never_followed(tmp_path, kind):
    path = pack(tmp_path / "a.tar", {"a.txt": b"hola"})
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("b.txt")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert texts(path) == {"a.tar!a.txt": ["hola"]}
    assert find(path).counts == {"links_in_archives": 1}


def test_links_in_a_zip_are_not_text(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hola")
        link = zipfile.ZipInfo("b.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert texts(path) == {"a.zip!a.txt": ["hola"]}
    assert find(path).counts == {"links_in_archives": 1}


def test_a_zip_that_is_encrypted_or_packed_in_another_way_is_refused(tmp_path):
    path = pack(tmp_path / "a.zip", {"a.txt": b"hola" * 9})
    raw = bytearray(path.read_bytes())
    for header, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        raw[raw.index(header) + place] |= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.zip!a\.txt is encrypted"):
        find(path)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("a.txt", "hola" * 99)
        with pytest.raises(DataError, match=f"packed with zip method {method}"):
            find(path)


def test_a_zip_whose_members_share_their_bytes_is_a_bomb(tmp_path):
    """The directory names the same megabytes a hundred times, as the known overlapping bombs do."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", "hola mundo\n" * 300_000)
        archive.filelist *= 100
    with pytest.raises(DataError, match=r"a bomb|[Oo]verlap"):
        find(path)


def test_a_directory_or_header_of_any_size_is_not_believed(tmp_path):
    path = pack(tmp_path / "a.zip", {"a.txt": b"hola"})
    raw = bytearray(path.read_bytes())
    end = raw.rindex(b"PK\5\6")
    start = struct.unpack_from("<L", raw, end + 16)[0]
    padded = raw[:start] + bytes(2**24) + raw[start:end]
    struct.pack_into("<L", raw, end + 12, len(padded) - start)
    path.write_bytes(padded + raw[end:])
    with pytest.raises(DataError, match="a directory of members of"):
        find(path)
    path = tmp_path / "a.tar.gz"
    info = tarfile.TarInfo("largo")
    info.type, info.size = tarfile.XHDTYPE, 2**28
    path.write_bytes(gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + bytes(2**28), 1))
    tracemalloc.start()
    with pytest.raises(DataError, match="a name or header of 268,435,456 bytes"):
        find(path)
    assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    tracemalloc.stop()


def test_more_members_than_the_limit_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tarfile.TarInfo("a.jpg").tobuf() * (MAX_MEMBERS + 1) + bytes(1024))
    with pytest.raises(DataError, match="more than 100,000 members"):
        find(path)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_in_every_dialect(tmp_path, format):
    name = "/".join(["ñandú" * 8, "b" * 50, "ó.txt"])
    path = pack(tmp_path / "a.tar", {name: b"hola", "corto.md": b"x"}, format=format)
    assert set(texts(path)) == {f"a.tar!{name}", "a.tar!corto.md"}


def test_what_follows_a_tar_or_is_missing_in_it_is_an_error(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.txt": b"hola" * 999, "b.txt": b"x"})
    raw = path.read_bytes()
    flipped = bytearray(raw)
    flipped[4608 + 3] ^= 1  # in the header of b.txt
    end = raw.rindex(b"x")
    for data, said in [
        (raw + raw, "there is data after its end"),
        (raw[: end + 512], "it ends in the middle"),
        (raw[:1000], "it ends in the middle"),
        (bytes(flipped), "bad checksum"),
    ]:
        path.write_bytes(data)
        with pytest.raises(DataError, match=f"damaged archive: {said}"):
            find(path)


def test_sparse_members_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("a.txt")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": str(2**40)}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info)
    with pytest.raises(DataError, match="sparse"):
        find(path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_that_changes_between_the_readings_is_an_error(tmp_path, kind):
    path = pack(tmp_path / f"a.{kind}", {"a.txt": b"hola", "b.txt": b"adios"})
    (source,) = find(path).sources
    pack(path, {"a.txt": b"HOLA", "b.txt": b"adios"})
    with pytest.raises(DataError, match="changed while it was read"):
        list(source.texts())


def test_a_text_need_not_be_read_to_its_end(tmp_path):
    for kind in KINDS:
        (source,) = find(pack(tmp_path / f"a.{kind}", {"a.txt": b"uno" * 10**6, "b.txt": b"dos"})).sources
        heads = [next(pieces)[:3] for pieces in source.texts()]
        assert heads == ["uno", "dos"]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    files = {"a.txt": b"hola\n" * 50, "ñ" * 90 + ".md": b"x", "c.jsonl": b'{"text": "uno"}'}
    return [pack(folder / f"{n}.{kind}", files).read_bytes() for n, kind in enumerate(("zip", "tar", "tar.gz"))]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_archive_is_text_or_a_data_error(tmp_path, archives, data):
    number = data.draw(st.integers(0, 2))
    raw = bytearray(archives[number])
    for _ in range(data.draw(st.integers(1, 3))):
        # mostly where there is something: the front (tar headers) and the back (a zip's directory)
        place = data.draw(st.integers(0, min(1600, len(raw) - 1)) | st.integers(max(0, len(raw) - 400), len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path = tmp_path / ("a.zip", "a.tar", "a.tar.gz")[number]
    path.write_bytes(raw)
    try:
        texts(path)
    except DataError as error:
        assert str(path) in error.message
        assert error.hint


def test_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        texts(pack(tmp_path / f"corpus.{kind}", FILES))
    assert sorted(os.listdir(tmp_path)) == sorted(f"corpus.{kind}" for kind in KINDS)
