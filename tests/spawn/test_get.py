"""`cuadrilla data get` as a user runs it: interrupted, killed, asked, behind a proxy, over TLS."""

import hashlib
import json
import os
import signal
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import trustme

from cuadrilla.cli import output
from cuadrilla.cli.data import get_command
from cuadrilla.errors import CuadrillaError
from tests.commands import begin, wait_for
from tests.inproc.test_get_folder import archive
from tests.inside import cuadrilla
from tests.web import CEILING_SECONDS, fixed, moved, serving, silent, whole

TEXT = ("En un lugar de la Mancha, de cuyo nombre no quiero acordarme. " * 3000).encode()
CLEAN = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}


@pytest.fixture
def server():
    with serving() as started:
        yield started


def get(
    *arguments: str, cwd: Path, env: Mapping[str, str] = CLEAN, code: int | None = None
) -> "subprocess.CompletedProcess[str]":
    return cuadrilla("data", "get", *arguments, cwd=cwd, env=env, code=code)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_and_run_again(server, tmp_path, end):
    url = server.on("/quijote.txt", silent(TEXT, after=100_000), whole(TEXT))
    child = begin("data", "get", url, cwd=tmp_path, env=CLEAN)
    wait_for(lambda: any(part.stat().st_size == 100_000 for part in (tmp_path / "corpus").glob(".*.part")), child)
    if end == signal.SIGINT:
        second = get(url, cwd=tmp_path)
        assert second.returncode == 2, second.stderr  # the folder is in use
    child.send_signal(end)
    assert child.wait(timeout=CEILING_SECONDS) == (130 if end == signal.SIGINT else -signal.SIGKILL)
    said = child.communicate()[1]
    assert "Traceback" not in said
    if end == signal.SIGINT:
        assert "interrupted; what has arrived is kept in corpus" in said
    get(url, cwd=tmp_path, code=0)
    assert (tmp_path / "corpus" / "quijote.txt").read_bytes() == TEXT
    assert {path.name for path in (tmp_path / "corpus").iterdir()} == {"quijote.txt", "SOURCE.json"}
    assert server.ranges()[1] == "bytes=100000-"


def test_results(server, tmp_path):
    sha256 = hashlib.sha256(TEXT).hexdigest()
    url = server.on("/quijote.txt", whole(TEXT))
    done = get(url, "--sha256", sha256.upper(), "--json", "--to", "textos", cwd=tmp_path)
    (row,) = json.loads(done.stdout)
    assert row == {
        "file": "textos/quijote.txt", "bytes": len(TEXT), "sha256": sha256,
        "licence": "unknown", "state": "fetched", "folder": "textos", "url": url,
    }  # fmt: skip
    assert "--sha256" in get("--help", cwd=tmp_path).stdout
    again = get(url, "--to", "textos", cwd=tmp_path)
    assert "already there" in again.stdout
    assert "cuadrilla data prepare textos --out data" in again.stderr


def test_errors(server, tmp_path, monkeypatch):
    """The command in this process, since a process for each would take a second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "textos").mkdir()
    url = server.on("/quijote.txt", whole(TEXT))
    server.on("/page.txt", fixed(200, b"<html>", kind="text/html"))
    for names, options, code in (
        (["quijot"], {}, 2),
        ([], {}, 2),
        ([url], {"sha256": "abc"}, 4),
        (["https://nadie.invalid/a.txt"], {}, 5),
        ([server.url("/page.txt")], {}, 4),
        ([server.url("/nada.txt")], {}, 5),
        (["hf:nada"], {}, 2),
        (["textos"], {}, 2),
    ):
        with pytest.raises(CuadrillaError) as caught:
            get_command(names, **options)
        assert caught.value.exit_code == code, names
        assert caught.value.hint


def test_the_catalogue(capsys, monkeypatch):
    monkeypatch.setattr(output.options, "json", False)
    get_command(show=True)
    shown = capsys.readouterr().out
    monkeypatch.setattr(output.options, "json", True)
    get_command(show=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["quijote", "conha19", "eltec-spa", "fineweb2-test"]
    for row in rows:
        assert row["url"] in shown
        assert row["licence"] in shown


BESIDE_THE_NOVELS = [f"conha19-main/{name}" for name in (
    "README.md", "tei/nh0001.xml", "txt_annotated/nh0001.txt", "schema/log-rng.txt", "travelogues/txt/nh9999.txt",
)]  # fmt: skip


def test_the_catalogue_over_tls_through_a_proxy(tmp_path):
    """A stand-in for the hosts of the catalogue, with their names in a certificate that is trusted or not."""
    authority, certificate = trustme.CA(), tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("github.com", "codeload.github.com").configure_cert(context)
    with serving(context) as server:
        server.on(
            "/cligs/conha19/archive/refs/heads/main.zip", moved("https://codeload.github.com/cligs/conha19/zip/main")
        )
        files = {"conha19-main/txt/nh0001.txt": TEXT, **dict.fromkeys(BESIDE_THE_NOVELS, b"not a novel")}
        server.on("/cligs/conha19/zip/main", fixed(200, archive(files), kind="application/zip"))
        proxied = {**CLEAN, "https_proxy": server.url("")}
        assert "SSL_CERT_FILE" in get("conha19", cwd=tmp_path, env=proxied, code=5).stderr
        get("conha19", cwd=tmp_path, env={**proxied, "SSL_CERT_FILE": str(certificate)}, code=0)
        folder = tmp_path / "corpus" / "conha19"
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {"nh0001.txt", "SOURCE.json"}
        assert (folder / "nh0001.txt").read_bytes() == TEXT
        assert [path for path, _ in server.seen if path.startswith("CONNECT")] == [
            "CONNECT github.com:443", "CONNECT github.com:443", "CONNECT codeload.github.com:443",
        ]  # fmt: skip
