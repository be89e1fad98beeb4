"""Datasets of a hub that is played on the loopback."""

import hashlib
import json
from urllib.parse import quote

import pytest
from huggingface_hub import constants

from cuadrilla.data.catalogue import resolve
from cuadrilla.data.download import fetch
from cuadrilla.data.prepare import no_progress
from cuadrilla.errors import DataError, LinkError
from tests.web import Answer, Handler, fixed, moved, serving, whole

TEXT = bytes(range(256)) * 3000
COMMIT = "c0ffee" * 6 + "abcd"


def test_a_hub_that_does_not_answer_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LinkError, match="hf:ana/corpus: "):
        resolve("hf:ana/corpus")


@pytest.fixture
def played(monkeypatch):
    """A hub with one dataset, whose files lie on another server, as the real ones do."""
    monkeypatch.setenv("HF_TOKEN", "hf_prueba")
    with serving() as server, serving() as store:
        monkeypatch.setattr(constants, "ENDPOINT", server.url(""))
        path = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url(path))
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
    play(server, store, card={"license": "odc-by"}, files={path: PARQUET, "data/spa/test/run.py": b"evil()"})
    (wanted,) = resolve("hf:ana/corpus@v2/data/spa/test")
    done = fetch(wanted, to=tmp_path, progress=no_progress)
    (record,) = done.records
    assert (tmp_path / "000_00000.parquet").read_bytes() == PARQUET
    assert record.url == server.url(f"/datasets/ana/corpus/resolve/{COMMIT}/{path}")
    assert record.licence == "odc-by"
    assert {headers.get("Authorization") for _, headers in server.seen} == {"Bearer hf_prueba"}
    assert store.seen
    assert not any("Authorization" in headers for _, headers in store.seen)  # the token stays at the hub
    store.on(f"/{path}", whole(PARQUET[:-5] + b"xPAR1"))
    with pytest.raises(DataError, match="SHA-256"):
        fetch(wanted, to=tmp_path / "again", progress=no_progress)


def test_folders_of_the_hub(played):
    server, store = played
    files = {"es/train-0.parquet": PARQUET, "es/train-1.parquet": PARQUET, "corpus.py": b"evil()"}
    play(server, store, card=None, files=files)
    found = resolve("hf:ana/corpus/es")
    assert [(each.name, each.subfolder) for each in found] == [
        ("train-0.parquet", "corpus-es"),
        ("train-1.parquet", "corpus-es"),
    ]
    assert [(each.name, each.subfolder) for each in resolve("hf:ana/corpus")] == [
        ("train-0.parquet", "corpus"),
        ("train-1.parquet", "corpus"),
    ]
    for address in ("hf:ana/corpus/pt", "hf:ana/nada"):
        with pytest.raises(LinkError):
            resolve(address)
