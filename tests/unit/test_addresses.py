"""Addresses and names from anybody: they become safe, or one error says why not."""

import io
import os
import stat
import unicodedata
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuadrilla.data.get import download
from cuadrilla.data.get.address import MAX_NAME_BYTES, RECORD, check_address, distinct_names, safe_name
from cuadrilla.data.get.catalogue import CATALOGUE, resolve
from cuadrilla.data.get.download import unpack
from cuadrilla.data.get.hub import HubDataset, choose
from cuadrilla.data.get.mount import SCHEMES
from cuadrilla.errors import ConfigError, CuadrillaError, DataError

EVIL = st.text(alphabet=st.sampled_from('./\\:\0\n aZ%2eñ\u202e\ud800*?"<>|~$'), max_size=40)


@given(st.text(max_size=300) | EVIL)
@example("CON.txt")
@example("source.json")
@example("..")
@example("a" * 300 + ".parquet")
@example("com¹")
def test_a_name_stays_in_its_folder(text):
    name = safe_name(text)
    assert name == os.path.basename(name)
    assert not set(name) & set('/\\:*?"<>|')
    assert name not in ("", ".", "..")
    assert not name.startswith(".")
    assert not name.endswith((".", " "))
    assert name.lower() != RECORD.lower()
    assert len(name.encode()) <= MAX_NAME_BYTES + 1
    assert all(unicodedata.category(character)[0] != "C" for character in name)
    assert name.split(".")[0].lower() not in ("con", "nul", "aux", "prn", "com1", "lpt9")
    assert safe_name(name) == name


def test_names_keep_what_they_can():
    assert safe_name("/a/b/Año 1.txt") == "Año 1.txt"
    assert safe_name("..\\..\\x.txt") == "x.txt"
    assert safe_name("ñ" * 300 + ".parquet").endswith("ñ.parquet")
    assert distinct_names(["a/1.parquet", "a/2.parquet"]) == {"a/1.parquet": "1.parquet", "a/2.parquet": "2.parquet"}
    assert set(distinct_names(["a/x/1.txt", "a/y/1.txt"]).values()) == {"x_1.txt", "y_1.txt"}


@given(st.text(max_size=100) | st.builds(lambda rest: f"https://{rest}", EVIL) | EVIL.map(lambda x: f"http://a.es/{x}"))
def test_an_address_is_ascii_or_refused(text):
    try:
        address = check_address(text)
    except ConfigError as error:
        assert error.hint
        return
    if urlsplit(address).scheme in ("http", "https"):
        assert address.isascii()
        assert address.isprintable()
        assert " " not in address
        assert urlsplit(address).hostname
        assert check_address(address) == address


@given(st.text(max_size=60) | st.sampled_from(SCHEMES).flatmap(lambda scheme: EVIL.map(lambda x: f"{scheme}x://{x}")))
def test_what_is_asked_for_is_understood_or_refused(text):
    try:
        found = resolve(text, split="x")  # nothing that would ask the network
    except CuadrillaError as error:
        assert error.hint
    else:
        assert found


@pytest.mark.parametrize(
    "address",
    [
        "https://ana:secreto@datos.es/a.txt",
        "https://ana@datos.es/a.txt",
        "https://datos.es/a.txt?token=abc",
        "https://datos.es/a.txt?x=1&X-Amz-Signature=abc",
        "https://datos.es/a.txt?sig=abc",
        "s3://AKIA:secreto@cubo/a.txt",
    ],
)
def test_secrets_in_addresses_are_refused_and_not_repeated(address):
    with pytest.raises(ConfigError) as caught:
        resolve(address)
    for secret in ("secreto", "abc", "AKIA"):
        assert secret not in caught.value.message + caught.value.hint


def test_addresses():
    assert (
        check_address("https://España.es/año 1.txt?q=ñ#parte") == "https://xn--espaa-rta.es/a%C3%B1o%201.txt?q=%C3%B1"
    )
    assert check_address("http://[::1]:8000/x") == "http://[::1]:8000/x"
    for bad in ("https://", "https:///x", "https://a.es:99999/", "http://a b/", "https://[::1", "http://a\\b/"):
        with pytest.raises(ConfigError):
            check_address(bad)
    with pytest.raises(ConfigError, match="not a known kind of address"):
        resolve("gopher://a/b")
    with pytest.raises(ConfigError, match="not a known kind of address"):
        resolve("memory://a/b::memory")


def test_the_catalogue_is_in_order():
    assert len({corpus.name for corpus in CATALOGUE}) == len(CATALOGUE)
    for corpus in CATALOGUE:
        assert safe_name(corpus.name) == corpus.name
        assert corpus.licence
        assert corpus.size
        if corpus.address.startswith("hf:"):
            HubDataset.parse(corpus.address, split=corpus.split, revision="")
        else:
            (wanted,) = resolve(corpus.name)
            assert wanted.url.startswith("https://")
    assert [corpus.name for corpus in CATALOGUE if not corpus.asks] == ["quijote", "fineweb2-test"]
    with pytest.raises(ConfigError) as caught:
        resolve("quijot")
    assert caught.value.hint == "did you mean quijote?"


PATHS = [
    "data/es/test/0.parquet",
    "data/es/train/0.parquet",
    "data/es/train/1.parquet",
    "data/es_x/test/0.parquet",
    "x.py",
]


def test_files_of_a_dataset():
    def chosen(config, split, patterns=()):
        return choose(PATHS, patterns, HubDataset(repo="a/b", config=config, split=split, revision="main"))

    assert chosen("es", "test") == ["data/es/test/0.parquet"]
    assert chosen("es", "train") == PATHS[1:3]
    assert chosen("", "test", ["data/*/test/*"]) == [PATHS[0], PATHS[3]]
    assert chosen("", "test", ["data/**/0.parquet"]) == [PATHS[0], PATHS[1], PATHS[3]]
    assert choose(["en/train-0.parquet", "en/test-0.parquet", "training.parquet"], [], HubDataset(
        repo="a/b", config="en", split="train", revision="main")) == ["en/train-0.parquet"]  # fmt: skip
    with pytest.raises(DataError, match=r"no parquet files for 'es test' \(only .py\)") as caught:
        choose(["x.py"], ["*"], HubDataset(repo="a/b", config="es", split="test", revision="main"))
    assert "scripts of datasets are not run" in caught.value.hint
    with pytest.raises(DataError):
        chosen("", "test", ["data/*"])  # a star does not cross folders
    for bad in ("hf:a", "hf:a/b/c/d", "hf:../..", "hf:a/b c", "hf:"):
        with pytest.raises(ConfigError):
            HubDataset.parse(bad, split="", revision="")


def archive(tmp_path: Path, members: dict[str, bytes], *, mode: int = stat.S_IFREG) -> Path:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (mode | 0o644) << 16
            opened.writestr(member, content)
    path = tmp_path / "archive.zip"
    path.write_bytes(data.getvalue())
    return path


def unpacked(tmp_path: Path, members: dict[str, bytes], **options: int) -> dict[str, bytes]:
    folder = tmp_path / "out"
    folder.mkdir(exist_ok=True)
    names = unpack(archive(tmp_path, members, **options), folder, inside="txt")
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    return {name: (folder / name).read_bytes() for name in names}


def test_one_folder_of_an_archive(tmp_path):
    members = {
        "repo-main/README.md": b"x",
        "repo-main/txt/uno.txt": b"one",
        "repo-main/txt/dos.txt": b"two",
        "repo-main/txt/more/tres.txt": b"deeper",
        "repo-main/txt_nouns/uno.txt": b"other",
        "../txt/../../evil.txt": b"evil",
    }
    assert unpacked(tmp_path, members) == {"uno.txt": b"one", "dos.txt": b"two"}
    assert {path.name for path in tmp_path.iterdir()} == {"archive.zip", "out"}


@pytest.mark.parametrize(
    ("members", "mode"),
    [
        ({"repo/tei/uno.xml": b"1"}, stat.S_IFREG),
        ({"repo/txt/uno.txt": b"/etc/passwd"}, stat.S_IFLNK),
    ],
)
def test_archives_that_are_refused(tmp_path, members, mode):
    with pytest.raises(DataError):
        unpacked(tmp_path, members, mode=mode)


def test_a_bomb_and_a_broken_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MAX_UNPACKED_BYTES", 10**6)
    with pytest.raises(DataError, match="can be unpacked"):
        unpacked(tmp_path, {f"r/txt/{n}.txt": b"0" * 400_000 for n in range(3)})
    path = archive(tmp_path, {"r/txt/a.txt": os.urandom(5000)})
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(path, tmp_path / "out", inside="txt")
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(path, tmp_path / "out", inside="txt")
