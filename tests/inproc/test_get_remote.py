"""Object stores through fsspec's own in-memory and local stores, and a hub that is played on the loopback."""

import hashlib
import json
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
import pytest

from cuadrilla.data.get.catalogue import resolve
from cuadrilla.data.get.download import fetch
from cuadrilla.data.get.hub import list_parquet
from cuadrilla.data.prepare import no_progress
from cuadrilla.errors import ConfigError, DataError, EnvironmentProblem, LinkError
from tests.web import Answer, Handler, cut, fixed, moved, serving, whole

TEXT = bytes(range(256)) * 3000
COMMIT = "c0ffee" * 6 + "abcd"


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    yield store
    store.store.clear()


def pull(argument: str, folder: Path) -> list[str]:
    done = [fetch(each, to=folder, progress=no_progress) for each in resolve(argument)]
    return [str((each.folder / each.records[0].name).relative_to(folder)) for each in done]


@pytest.mark.parametrize("endpoint", ["http://example.org", "http://localhost.example.org:1"])
def test_the_hubs_token_is_not_sent_unencrypted(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError, match="unencrypted"):
        list_parquet("hf:ana/corpus", endpoint=endpoint)


def test_a_hub_that_does_not_answer_is_an_error_of_ours() -> None:
    with pytest.raises(LinkError, match="cannot be listed"):
        list_parquet("hf:ana/corpus", endpoint="http://127.0.0.1:9")


def test_a_store(memory, tmp_path):
    memory.pipe({"/cubo/libros/a.txt": TEXT, "/cubo/libros/más/b.txt": b"dos", "/cubo/libros/.x": b"hidden"})
    assert pull("memory://cubo/libros/a.txt", tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_bytes() == TEXT
    assert pull("memory://cubo/libros", tmp_path) == ["libros/a.txt", "libros/más_b.txt"]
    assert (tmp_path / "libros" / "más_b.txt").read_bytes() == b"dos"
    with pytest.raises(LinkError, match="no such file"):
        pull("memory://cubo/nada.txt", tmp_path)


def test_a_local_file_system(tmp_path):
    source = tmp_path / "nas" / "Ñ 1.txt"
    source.parent.mkdir()
    source.write_bytes(TEXT)
    assert pull(f"file://{source}", tmp_path / "corpus") == ["Ñ 1.txt"]
    assert (tmp_path / "corpus" / "Ñ 1.txt").read_bytes() == TEXT


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


def entries_of(files: dict[str, bytes], folder: str, *, recursive: bool) -> bytes:
    """What lies in a folder, as the hub lists it."""
    rows: dict[str, object] = {}
    for path, content in files.items():
        if not path.startswith(folder):
            continue
        name, *deeper = path[len(folder) :].split("/")
        found = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        file = {"type": "file", "path": path, "size": len(content), "oid": "0" * 40, "lfs": found}
        if deeper:
            rows[name] = {"type": "directory", "path": folder + name, "oid": "0" * 40}
        if recursive or not deeper:
            rows[path] = file
    return json.dumps(list(rows.values())).encode()


def listing(files: dict[str, bytes], folder: str) -> Answer:
    def answer(handler: Handler) -> None:
        rows = entries_of(files, folder, recursive="recursive=true" in handler.path)
        handler.reply(200, rows, kind="application/json")

    return answer


PARQUET = b"PAR1" + TEXT + b"PAR1"
SPA = [{"split": "train", "path": "data/spa/train/*"}, {"split": "test", "path": ["data/spa/test/*"]}]
CONFIGS = [{"config_name": "spa", "data_files": SPA}, {"config_name": "por", "data_files": "data/por/*"}]


def play(server, store, *, card: object, files: dict[str, bytes]) -> None:
    info = {"_id": "1", "id": "ana/corpus", "sha": COMMIT, "cardData": card, "tags": [], "siblings": []}
    for revision in ("main", "v2", COMMIT):
        server.on(
            f"/api/datasets/ana/corpus/revision/{revision}",
            fixed(200, json.dumps(info).encode(), kind="application/json"),
        )
    for path in files:
        parents = path.split("/")[:-1]
        for depth in range(len(parents) + 1):
            folder = "/".join(parents[:depth])
            tree = f"/api/datasets/ana/corpus/tree/{COMMIT}" + (f"/{quote(folder, safe='')}" if folder else "")
            server.on(tree, listing(files, f"{folder}/" if folder else ""))
    for path, content in files.items():
        server.on(f"/datasets/ana/corpus/resolve/{COMMIT}/{path}", moved(store.url(f"/{path}?X-Amz-Signature=1")))
        store.on(f"/{path}", whole(content))


def test_a_dataset_of_the_hub(played, tmp_path):
    server, store = played
    path = "data/spa/test/000_00000.parquet"
    play(server, store, card={"configs": CONFIGS, "license": "odc-by"}, files={path: PARQUET})
    store.on(f"/{path}", cut(PARQUET, after=1000), whole(PARQUET))
    (wanted,) = list_parquet("hf:ana/corpus/spa", split="test", revision="v2", endpoint=server.url(""))
    done = fetch(wanted, to=tmp_path, progress=no_progress)
    (record,) = done.records
    assert (tmp_path / "corpus-spa-test" / "000_00000.parquet").read_bytes() == PARQUET
    assert record.revision == COMMIT
    assert record.vouched_by == "hub"
    assert record.licence == "odc-by"
    assert "Signature" not in (done.folder / "SOURCE.json").read_text()
    assert {headers.get("Authorization") for seen, headers in server.seen} == {"Bearer hf_prueba"}
    assert not any("Authorization" in headers for _, headers in store.seen)  # the token stays at the hub
    store.on(f"/{path}", whole(PARQUET[:-5] + b"xPAR1"))
    with pytest.raises(DataError, match="SHA-256"):
        fetch(wanted, to=tmp_path / "again", progress=no_progress)


def test_configurations_and_splits(played):
    server, store = played
    play(server, store, card={"configs": CONFIGS}, files={"data/por/0.parquet": PARQUET})

    def listed(text: str, split: str = "") -> list[str]:
        found = list_parquet(text, split=split, endpoint=server.url(""))
        return [unquote(each.url.rpartition(COMMIT)[2]) for each in found]

    assert listed("hf:ana/corpus/por") == ["/data/por/0.parquet"]
    with pytest.raises(ConfigError, match="no configuration 'default'") as caught:
        listed("hf:ana/corpus")
    assert "por, spa" in caught.value.hint
    with pytest.raises(ConfigError, match="no split 'valid'") as caught:
        listed("hf:ana/corpus/spa", "valid")
    assert "test, train" in caught.value.hint
    play(server, store, card=None, files={"es/train-0.parquet": PARQUET, "corpus.py": b"evil()"})
    assert listed("hf:ana/corpus/es") == ["/es/train-0.parquet"]
    play(server, store, card=None, files={"corpus.py": b"evil()", "es.jsonl": b"{}"})
    with pytest.raises(DataError, match="no parquet files"):
        listed("hf:ana/corpus/es")
    with pytest.raises(LinkError, match="cannot be listed"):
        listed("hf:ana/nada")
