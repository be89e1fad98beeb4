"""Listing, refusing and detecting: real files in a temporary folder."""

import os
import unicodedata

import pytest

from cuadrilla.errors import ConfigError, DataError
from tests.reading import find, texts

TEXT = "El niño comió más piñas en la montaña, según contó María.\n\n¿Qué haría él? «Nada», dijo.\n" * 30


def survey(path):
    (source,) = find(path).all
    return source


@pytest.mark.parametrize(
    ("raw", "encoding"),
    [
        (TEXT.encode(), "utf-8"),
        (b"", "utf-8"),
        (TEXT.encode("utf-8-sig"), "utf-8"),
        (TEXT.encode("latin-1"), "cp1252"),
        (TEXT.encode("mac_roman"), "mac_roman"),
        (TEXT.encode("cp850"), "cp850"),
        (TEXT.encode("utf-16"), "utf-16"),
    ],
)
def test_encoding_is_detected_and_the_text_comes_back(tmp_path, raw, encoding):
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    source = survey(path)
    assert source.encoding == encoding
    text = raw.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    assert source.num_bytes == len(text.encode())
    assert texts(path) == [text]


def test_damage_beyond_the_first_megabyte_is_seen(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"ascii only\n" * 200_000 + "así, mañana\n".encode("latin-1") * 20)
    assert survey(path).encoding == "cp1252"
    assert "mañana" in texts(path)[0]


def test_another_script_is_not_taken_for_spanish(tmp_path):
    russian = "Съешь ещё этих мягких французских булок, да выпей же чаю. " * 40
    path = tmp_path / "a.txt"
    path.write_bytes(russian.encode("cp1251"))
    assert texts(path) == [russian]


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("model.pt", b"x", "not read as text"),
        ("pickle.txt", b"\x80\x04\x95", "control characters"),
        ("zeros.txt", b"hola" + b"\0" * 4096, "control characters"),
        ("table.csv", b"a,b", "not read as text"),
    ],
)
def test_what_is_not_text_is_refused_with_a_reason(tmp_path, name, raw, reason):
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(DataError, match=reason) as caught:
        find(path)
    assert name in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["a.zip", "A.ZIP", "a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"])
def test_an_archive_is_refused_with_what_to_do(tmp_path, name):
    path = tmp_path / "libros" / name
    path.parent.mkdir()
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=f"{name} is an archive") as caught:
        find(path)
    assert f"unzip {path} -d" in str(caught.value.hint)
    (tmp_path / "libros" / "a.txt").write_text("hola")
    assert find(path.parent).skipped == [f"libros/{name}"]
    assert texts(path.parent) == ["hola"]


def test_a_folder_is_listed_by_name_and_what_is_not_text_is_named(tmp_path):
    folder = tmp_path / "libros"
    (folder / "b" / ".git").mkdir(parents=True)
    for name in ("z.txt", "b/a.MD", "b/.git/x.txt", ".hidden.txt", "SOURCE.json", "foto.jpg", "b/m.pt"):
        (folder / name).write_text(name)
    (folder / "link.txt").symlink_to(folder / "z.txt")
    (folder / "b" / "loop").symlink_to(folder)
    (folder / "broken.txt").symlink_to(tmp_path / "missing")
    os.mkfifo(folder / "pipe.txt")
    found = find(folder)
    assert [source.name for source in found.all] == ["libros/b/a.MD", "libros/link.txt"]
    assert found.skipped == ["libros/b/m.pt", "libros/broken.txt", "libros/foto.jpg", "libros/pipe.txt"]
    assert found.counts == {"files_not_text": 4}


def test_names_are_the_same_on_every_machine(tmp_path):
    folder = tmp_path / unicodedata.normalize("NFD", "año 🙂")
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    (folder / "d\n\x1b[31m.txt").write_text("y")
    assert [each.name for each in find(folder).all] == ["año 🙂/caf\ufffd.txt", "año 🙂/d\\n\\u001b[31m.txt"]


def test_missing_files_and_bad_arguments_name_the_remedy(tmp_path):
    (tmp_path / "quijote.txt").write_text("x")
    with pytest.raises(DataError, match="No such file"):
        find(tmp_path / "quijte.txt")
    for spec in ("cuentos:", "cuentos:0", "cuentos:-1", "cuentos:1e3", "cuentos:9999999999", ""):
        with pytest.raises(ConfigError):
            find(spec)
    for path in (os.devnull, "a\0b", "x" * 5000):
        with pytest.raises(DataError):
            find(path)


def test_what_tells_about_a_corpus_is_no_text_unless_it_is_given(tmp_path):
    for name in ("README.md", "LICENSE", "LEEME.txt", "Licence-CC.txt", "readme.es.txt", "licenciado.txt"):
        (tmp_path / name).write_text(TEXT)
    found = find(tmp_path)
    assert [source.name.rpartition("/")[2] for source in found.all] == ["LEEME.txt", "licenciado.txt"]
    assert found.counts == {"files_about_the_corpus": 3, "files_not_text": 1}
    assert len(find(tmp_path / "README.md").all) == 1


def test_a_file_of_two_encodings_is_read_letter_by_letter(tmp_path):
    first, second = TEXT, TEXT.replace("niño", "caño")
    path = tmp_path / "a.txt"
    path.write_bytes(first.encode() + second.encode("cp1252"))
    assert texts(path) == [first + second]
    assert survey(path).encoding == "utf-8"
