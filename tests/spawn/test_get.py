"""`cuadrilla data get` as a user runs it: interrupted, killed, asked, behind a proxy, over TLS."""

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
from cuadrilla.errors import ConfigError
from tests.commands import begin, wait_for
from tests.inproc.test_get_folder import archive
from tests.inside import cuadrilla
from tests.web import CEILING_SECONDS, Server, fixed, moved, serving, silent, whole

TEXT = ("En un lugar de la Mancha, de cuyo nombre no quiero acordarme. " * 3000).encode()
CLEAN = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}


def get(
    *arguments: str, cwd: Path, env: Mapping[str, str] = CLEAN, code: int | None = None
) -> "subprocess.CompletedProcess[str]":
    return cuadrilla("data", "get", *arguments, cwd=cwd, env=env, code=code)


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    """Its certificate is in `authority.pem`."""
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "authority.pem")
    return made


def host_of(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def through(proxy: Server, folder: Path) -> Mapping[str, str]:
    return {**CLEAN, "https_proxy": proxy.url(""), "SSL_CERT_FILE": str(folder / "authority.pem")}


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_and_run_again(authority, tmp_path, end):
    folder = tmp_path / "corpus" / "quijote"
    with serving(host_of(authority, "www.gutenberg.org")) as server:
        server.on("/cache/epub/2000/pg2000.txt", silent(TEXT, after=100_000), whole(TEXT))
        env = through(server, tmp_path)
        child = begin("data", "get", "quijote", cwd=tmp_path, env=env)
        wait_for(server.reached.is_set, child)
        if end == signal.SIGINT:
            second = get("quijote", cwd=tmp_path, env=env)
            assert second.returncode == 2, second.stderr  # the folder is in use
        child.send_signal(end)
        assert child.wait(timeout=CEILING_SECONDS) == (130 if end == signal.SIGINT else -signal.SIGKILL)
        said = child.communicate()[1]
        assert "Traceback" not in said
        assert not (folder / "quijote.txt").exists()
        if end == signal.SIGINT:
            assert said.endswith("interrupted\n")
        done = get("quijote", "--json", cwd=tmp_path, env=env, code=0)
        assert (folder / "quijote.txt").read_bytes() == TEXT
        assert {path.name for path in folder.iterdir()} == {"quijote.txt", "SOURCE.json"}
        row = {
            "folder": "corpus/quijote", "files": 1, "bytes": len(TEXT), "licence": "Project Gutenberg License",
        }  # fmt: skip
        assert json.loads(done.stdout) == [{**row, "state": "fetched"}]
        assert "cuadrilla data prepare corpus/quijote --out data" in done.stderr
        again = get("quijote", "--json", cwd=tmp_path, env=env, code=0)
        assert json.loads(again.stdout) == [{**row, "state": "already there"}]


@pytest.mark.parametrize("names", [["quijot"], ["https://example.org/a.txt"], ["hf:nada"], ["corpus"]])
def test_only_names_of_the_catalogue(tmp_path, monkeypatch, names):
    """The command in this process, since a process for each would take a second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    with pytest.raises(ConfigError) as caught:
        get_command(names)
    assert "data get" in caught.value.hint
    assert [*(tmp_path / "corpus").iterdir()] == []


def test_the_catalogue(capsys, monkeypatch):
    monkeypatch.setattr(output.options, "json", False)
    get_command()
    shown = capsys.readouterr().out
    monkeypatch.setattr(output.options, "json", True)
    get_command()
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["quijote", "conha19", "eltec-spa", "fineweb2-test"]
    for row in rows:
        assert row["url"] in shown
        assert row["licence"] in shown


BESIDE_THE_NOVELS = [f"conha19-main/{name}" for name in (
    "README.md", "tei/nh0001.xml", "txt_annotated/nh0001.txt", "schema/log-rng.txt", "travelogues/txt/nh9999.txt",
)]  # fmt: skip


def test_the_catalogue_over_tls_through_a_proxy(authority, tmp_path):
    """A stand-in for the hosts of the catalogue, with their names in a certificate that is trusted or not."""
    with serving(host_of(authority, "github.com", "codeload.github.com")) as server:
        server.on(
            "/cligs/conha19/archive/refs/heads/main.zip", moved("https://codeload.github.com/cligs/conha19/zip/main")
        )
        files = {"conha19-main/txt/nh0001.txt": TEXT, **dict.fromkeys(BESIDE_THE_NOVELS, b"not a novel")}
        server.on("/cligs/conha19/zip/main", fixed(200, archive(files), kind="application/zip"))
        untrusted = {**CLEAN, "https_proxy": server.url("")}
        assert "SSL_CERT_FILE" in get("conha19", cwd=tmp_path, env=untrusted, code=5).stderr
        get("conha19", cwd=tmp_path, env=through(server, tmp_path), code=0)
        folder = tmp_path / "corpus" / "conha19"
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {"nh0001.txt", "SOURCE.json"}
        assert (folder / "nh0001.txt").read_bytes() == TEXT
        assert [path for path, _ in server.seen if path.startswith("CONNECT")] == [
            "CONNECT github.com:443", "CONNECT github.com:443", "CONNECT codeload.github.com:443",
        ]  # fmt: skip
