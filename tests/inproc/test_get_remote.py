"""Object stores through fsspec's own in-memory and local stores, and a hub that is played on the loopback."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
import pytest

from cuadrilla.data.get import hub
from cuadrilla.data.get.catalogue import resolve
from cuadrilla.data.get.download import DownloadPolicy, DownloadRequest, fetch
from cuadrilla.data.get.hub import HubDataset, list_parquet
from cuadrilla.data.get.mount import Mount
from cuadrilla.data.get.stream import PassingError, Stream
from cuadrilla.errors import ConfigError, DataError, EnvironmentProblem, LinkError
from tests.web import cut, fixed, moved, serving, whole

TEXT = bytes(range(256)) * 3000
COMMIT = "c0ffee" * 6 + "abcd"


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    yield store
    store.store.clear()


def pull(argument: str, folder: Path, **policy: object) -> list[str]:
    patience = DownloadPolicy(sleep=lambda _seconds: None, **policy)  # type: ignore[arg-type]
    done = [fetch(each, to=folder, policy=patience) for each in resolve(argument)]
    return [str((each.folder / each.record.name).relative_to(folder)) for each in done]


def test_a_store(memory, tmp_path):
    memory.pipe({"/cubo/libros/a.txt": TEXT, "/cubo/libros/más/b.txt": b"dos", "/cubo/libros/.x": b"hidden"})
    assert pull("memory://cubo/libros/a.txt", tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_bytes() == TEXT
    assert pull("memory://cubo/libros", tmp_path) == ["libros/a.txt", "libros/b.txt"]
    assert (tmp_path / "libros" / "b.txt").read_bytes() == b"dos"
    with pytest.raises(LinkError, match="no such file"):
        pull("memory://cubo/nada.txt", tmp_path)


def test_a_local_file_system(tmp_path):
    source = tmp_path / "nas" / "Ñ 1.txt"
    source.parent.mkdir()
    source.write_bytes(TEXT)
    assert pull(f"file://{source}", tmp_path / "corpus") == ["Ñ 1.txt"]
    assert (tmp_path / "corpus" / "Ñ 1.txt").read_bytes() == TEXT


class Interrupted(Mount):
    """A store whose connection breaks once, after the first piece of the first stream."""

    def __init__(self, file_system: object, path: str) -> None:
        super().__init__(file_system, path)
        self.offsets: list[int] = []

    def open(self, offset: int, validator: str) -> Stream:
        self.offsets.append(offset)
        stream = super().open(offset, validator)
        return stream if len(self.offsets) > 1 else replace(stream, chunks=self.broken(stream))

    def broken(self, stream: Stream):
        yield next(iter(stream.chunks))[:5000]
        raise PassingError("cut")


@pytest.mark.parametrize("changes", [False, True])
def test_a_store_resumes_unless_the_file_changed(memory, tmp_path, changes):
    memory.pipe("/cubo/a.bin", TEXT)
    origin = Interrupted(memory, "/cubo/a.bin")
    other = TEXT[::-1] + b"!"

    def sleep(_seconds: float) -> None:
        if changes:
            memory.pipe("/cubo/a.bin", other)

    fetch(DownloadRequest(origin=origin, url="memory://cubo/a.bin"), to=tmp_path, policy=DownloadPolicy(sleep=sleep))
    assert (tmp_path / "a.bin").read_bytes() == (other if changes else TEXT)
    assert origin.offsets == [0, 5000]


def test_a_store_whose_library_is_missing():
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(EnvironmentProblem) as caught:
            resolve("s3://cubo/a.txt")
        assert caught.value.hint == 'pip install "cuadrilla[remote]"'
    else:
        pytest.skip("needs an installation without s3fs")


@pytest.fixture
def played(monkeypatch):
    """A hub with one dataset, whose files lie on another server, as the real ones do."""
    monkeypatch.setenv("HF_TOKEN", "hf_prueba")
    with serving() as server, serving() as store:
        yield server, store


def files_of(text: dict[str, bytes]) -> bytes:
    rows = [
        {
            "type": "file", "path": path, "size": len(content), "oid": "0" * 40,
            "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130},
        }
        for path, content in text.items()
    ]  # fmt: skip
    return json.dumps(rows).encode()


PARQUET = b"PAR1" + TEXT + b"PAR1"
SPA = [{"split": "train", "path": "data/spa/train/*"}, {"split": "test", "path": ["data/spa/test/*"]}]
CONFIGS = [{"config_name": "spa", "data_files": SPA}, {"config_name": "por", "data_files": "data/por/*"}]


def play(server, store, *, card: object, files: dict[str, bytes], folder: str) -> None:
    info = {"_id": "1", "id": "ana/corpus", "sha": COMMIT, "cardData": card, "tags": [], "siblings": []}
    for revision in ("main", "v2"):
        server.on(
            f"/api/datasets/ana/corpus/revision/{revision}",
            fixed(200, json.dumps(info).encode(), kind="application/json"),
        )
    tree = f"/api/datasets/ana/corpus/tree/{COMMIT}" + (f"/{quote(folder, safe='')}" if folder else "")
    server.on(tree, fixed(200, files_of(files), kind="application/json"))
    for path, content in files.items():
        server.on(f"/datasets/ana/corpus/resolve/{COMMIT}/{path}", moved(store.url(f"/{path}?X-Amz-Signature=1")))
        store.on(f"/{path}", whole(content))


def test_a_dataset_of_the_hub(played, tmp_path):
    server, store = played
    path = "data/spa/test/000_00000.parquet"
    play(server, store, card={"configs": CONFIGS, "license": "odc-by"}, files={path: PARQUET}, folder="data/spa/test")
    store.on(f"/{path}", cut(PARQUET, after=1000), whole(PARQUET))
    (wanted,) = list_parquet(
        HubDataset.parse("hf:ana/corpus/spa", split="test", revision="v2"), endpoint=server.url("")
    )
    done = fetch(wanted, to=tmp_path, policy=DownloadPolicy(sleep=lambda _seconds: None))
    assert (tmp_path / "corpus-spa-test" / "000_00000.parquet").read_bytes() == PARQUET
    assert done.record.revision == COMMIT
    assert done.record.vouched_by == "hub"
    assert done.record.licence == "odc-by"
    assert "Signature" not in (done.folder / "SOURCE.json").read_text()
    assert {headers.get("Authorization") for seen, headers in server.seen} == {"Bearer hf_prueba"}
    assert not any("Authorization" in headers for _, headers in store.seen)  # the token stays at the hub
    store.on(f"/{path}", whole(PARQUET[:-5] + b"xPAR1"))
    with pytest.raises(DataError, match="SHA-256"):
        fetch(wanted, to=tmp_path / "again", policy=DownloadPolicy())


def test_configurations_and_splits(played):
    server, store = played
    play(server, store, card={"configs": CONFIGS}, files={"data/por/0.parquet": PARQUET}, folder="data/por")

    def listed(text: str, split: str = "") -> list[str]:
        found = list_parquet(HubDataset.parse(text, split=split, revision=""), endpoint=server.url(""))
        return [unquote(each.url.rpartition(COMMIT)[2]) for each in found]

    assert listed("hf:ana/corpus/por") == ["/data/por/0.parquet"]
    with pytest.raises(ConfigError, match="no configuration 'default'") as caught:
        listed("hf:ana/corpus")
    assert "por, spa" in caught.value.hint
    with pytest.raises(ConfigError, match="no split 'valid'") as caught:
        listed("hf:ana/corpus/spa", "valid")
    assert "test, train" in caught.value.hint
    play(server, store, card=None, files={"es/train-0.parquet": PARQUET, "corpus.py": b"evil()"}, folder="")
    assert listed("hf:ana/corpus/es") == ["/es/train-0.parquet"]
    play(server, store, card=None, files={"corpus.py": b"evil()", "es.jsonl": b"{}"}, folder="")
    with pytest.raises(DataError, match="no parquet files"):
        listed("hf:ana/corpus/es")
    with pytest.raises(LinkError, match="cannot be listed"):
        listed("hf:ana/nada")


def test_the_token_never_travels_in_the_clear():
    assert hub._may_carry("https://huggingface.co", "hf_x")
    assert hub._may_carry("http://127.0.0.1:8000", "hf_x")
    assert hub._may_carry("http://espejo.es", "")
    assert not hub._may_carry("http://espejo.es", "hf_x")
