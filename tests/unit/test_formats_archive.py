"""Zip and tar: members as streams, and every trick of a hostile archive."""

import gzip
import hashlib
import io
import tarfile
import zipfile

import pytest

from cuadrilla.data import sources
from cuadrilla.errors import DataError
from tests.reading import by_name, find, texts

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


def pack(path, files, **options):
    """Write an archive, of the kind that its name says."""
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
def test_the_texts_of_an_archive_are_a_source(tmp_path, kind):
    path = pack(tmp_path / f"corpus.{kind}", FILES)
    name = path.name
    assert texts(path) == [TEXT, TEXT, "# hola\n    codigo\n", "uno", "dos", "La novela."]
    found = find(path)
    assert found.counts == {"files_xml_not_tei": 1, "files_not_text": 4}
    assert found.skipped == [
        f"{name}!repo/{skipped}" for skipped in ("dentro.txt.gz", "dentro.zip", "foto.jpg", "model.pkl", "pom.xml")
    ]
    (source,) = found.all
    assert (source.name, source.encoding) == (name, "cp1252, utf-8")
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [text.keeps_indentation for text in found.texts()] == [False, False, True, *[False] * 3]


def test_members_that_unpack_to_more_than_the_limit_are_refused(tmp_path, monkeypatch):
    """Also if a zip's directory names the same bytes again and again, as the known overlapping bombs do."""
    monkeypatch.setattr(sources, "MAX_UNPACKED_BYTES", 2**22)
    raw = b"hola mundo\n" * 2**18
    for kind in KINDS[1:]:
        assert len(texts(pack(tmp_path / f"a.{kind}", {"a.txt": raw}))) == 1
        with pytest.raises(DataError, match=r"unpacks to more than 4,194,304 bytes"):
            find(pack(tmp_path / f"a.{kind}", {"a.txt": raw, "b.txt": raw}))
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", raw)
        archive.filelist *= 100
    with pytest.raises(DataError, match=r"unpacks to more|[Oo]verlap"):
        find(tmp_path / "b.zip")


def test_an_error_in_a_member_names_it(tmp_path):
    for kind, files, said in [
        ("tar.gz", {"ok.txt": b"ok", "a.txt": b"\x80\x04\x95"}, "!a.txt is not text: 33% of its bytes"),
        ("tar", {"a.xml": b"<TEI>"}, "!a.xml:1: not well-formed XML"),
    ]:
        path = pack(tmp_path / f"a.{kind}", files)
        with pytest.raises(DataError) as caught:
            find(path)
        assert caught.value.message.startswith(f"{path}{said}")


def test_names_are_labels_and_cannot_write_on_the_terminal(tmp_path):
    path = pack(tmp_path / "a.tar", {"../Libro:/\x1b[2Ja\x07.jpg": b"hola", "/etc/passwd.txt": b"hola"})
    assert by_name(path) == {"a.tar": ["hola"]}
    assert find(path).skipped == ["a.tar!../Libro:/\\u001b[2Ja\\u0007.jpg"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_never_followed(tmp_path, kind):
    path = pack(tmp_path / "a.tar", {"a.txt": b"hola"})
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("b.txt")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert texts(path) == ["hola"]


def test_a_zip_that_is_encrypted_is_refused(tmp_path):
    path = pack(tmp_path / "a.zip", {"a.txt": b"hola" * 9})
    raw = bytearray(path.read_bytes())
    for header, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        raw[raw.index(header) + place] |= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.zip cannot be read: .* is encrypted"):
        find(path)


@pytest.mark.parametrize(("kind", "said"), [("tar", "unexpected end of data"), ("zip", "File is not a zip file")])
def test_what_is_missing_in_an_archive_is_an_error(tmp_path, kind, said):
    path = pack(tmp_path / f"a.{kind}", {"a.txt": b"hola" * 999, "b.txt": b"x"})
    path.write_bytes(path.read_bytes()[: {"tar": 1000, "zip": 100}[kind]])
    with pytest.raises(DataError, match=rf"a\.{kind} cannot be read: {said}"):
        find(path)
