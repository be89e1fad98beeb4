"""The allow-list: one name, one key; damaged lists let nobody in; no change is lost."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509

from cuadrilla.errors import ConfigError
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import (
    ENROL_CERTIFICATE,
    CoordinatorKeys,
    enrol_identity,
    is_enrol,
    key_hash,
    node_request,
    open_coordinator,
)
from tests.crews import NOW, key_of, refused, request_with

pytestmark = pytest.mark.unit


@pytest.fixture
def crew(tmp_path: Path) -> CoordinatorKeys:
    return open_coordinator(tmp_path / "crew", now=NOW)


def node_certificate(folder: Path, *, name: str, crew: CoordinatorKeys) -> bytes:
    return crew.sign(node_request(folder / name, name=name))[1]


def test_allow_list(tmp_path: Path, crew: CoordinatorKeys) -> None:
    path = tmp_path / "crew" / "nodes.json"
    nodes, of_another_process = AllowList(path), AllowList(path)
    ana, luis = (node_certificate(tmp_path, name=name, crew=crew) for name in ("ana", "luis"))
    assert nodes.nodes() == {}
    assert nodes.name_of(ana) is None  # signed by the crew's CA, and still nobody
    nodes.add("ana", certificate=ana)
    nodes.add("ana", certificate=ana)
    nodes.add("luis", certificate=luis)
    assert of_another_process.name_of(luis) == "luis"
    assert of_another_process.nodes() == {"ana": key_hash(ana), "luis": key_hash(luis)}
    of_another_process.remove("luis")
    assert nodes.name_of(luis) is None
    assert nodes.name_of(ana) == "ana"
    written = json.loads(path.read_text())
    assert written == {"schema": 1, "nodes": {"ana": key_hash(ana).hex()}}
    assert {file.name for file in path.parent.glob("*nodes*")} == {"nodes.json"}


def test_one_name_one_key(tmp_path: Path, crew: CoordinatorKeys) -> None:
    nodes = AllowList(tmp_path / "nodes.json")
    ana, luis = (node_certificate(tmp_path, name=name, crew=crew) for name in ("ana", "luis"))
    nodes.add("ana", certificate=ana)
    error = refused(lambda: nodes.add("ana", certificate=luis))
    assert "under the name ana" in error.message
    assert "cuadrilla kick ana" in error.hint
    assert "under the name ana" in refused(lambda: nodes.add("luis", certificate=ana)).message
    assert "ana" in refused(lambda: nodes.remove("luis")).hint
    refused(lambda: nodes.add("Ana", certificate=luis))
    refused(lambda: nodes.add("luis", certificate=b"no certificate"))
    assert nodes.nodes() == {"ana": key_hash(ana)}
    nodes.remove("ana")
    nodes.add("ana", certificate=luis)
    assert nodes.name_of(luis) == "ana"


def test_machines_of_one_name_are_numbered(tmp_path: Path, crew: CoordinatorKeys) -> None:
    nodes, long = AllowList(tmp_path / "nodes.json"), 63 * "a"
    keys = [node_certificate(tmp_path / str(number), name="aula", crew=crew) for number in range(13)]
    given = [nodes.add("aula", certificate=key, numbered=True) for key in keys[:11]]
    assert given == ["aula", *(f"aula-{number}" for number in range(2, 12))]
    assert [nodes.add("aula", certificate=key, numbered=True) for key in keys[:11]] == given  # each keeps its own
    assert nodes.add("otra", certificate=keys[3], numbered=True) == "aula-4"  # whatever it calls itself meanwhile
    nodes.remove("aula-5")
    assert nodes.add("aula", certificate=keys[11], numbered=True) == "aula-5"
    assert nodes.add(long, certificate=keys[4], numbered=True) == long
    assert nodes.add(long, certificate=keys[12], numbered=True) == 61 * "a" + "-2"


def test_the_enrol_key_is_never_a_node(tmp_path: Path, crew: CoordinatorKeys) -> None:
    enrol = enrol_identity(crew.identity.certificate)
    assert key_of(enrol).public_key() == x509.load_pem_x509_certificate(ENROL_CERTIFICATE).public_key()
    _, certificate = crew.sign(request_with(key_of(enrol), "ana"))
    assert is_enrol(certificate)
    refused(lambda: AllowList(tmp_path / "nodes.json").add("ana", certificate=certificate))
    assert not (tmp_path / "nodes.json").exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"nodes": []}',
        '{"nodes": {"ana": 3}}',
        '{"nodes": {"ana": "00"}}',
        '{"nodes": {"ana": "zz"}}',
        json.dumps({"nodes": {"../ana": "00" * 32}}),
        json.dumps({"nodes": {"ana": "00" * 32, "luis": "00" * 32}}),
        "\x00",
    ],
)
def test_a_damaged_list_lets_nobody_in(tmp_path: Path, crew: CoordinatorKeys, content: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(content)
    nodes = AllowList(path)
    ana = node_certificate(tmp_path, name="ana", crew=crew)
    refused(lambda: nodes.name_of(ana))
    refused(lambda: nodes.add("ana", certificate=ana))
    refused(lambda: nodes.remove("ana"))
    assert path.read_text() == content


def test_threads_lose_no_change(tmp_path: Path, crew: CoordinatorKeys) -> None:
    nodes = AllowList(tmp_path / "nodes.json")
    certificates = {f"n{i}": node_certificate(tmp_path, name=f"n{i}", crew=crew) for i in range(8)}
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(nodes.add, name, certificate=pem) for name, pem in certificates.items()]:
            done.result()
    assert set(nodes.nodes()) == set(certificates)


def test_two_processes_never_change_it_at_once(tmp_path: Path, crew: CoordinatorKeys) -> None:
    nodes = AllowList(tmp_path / "nodes.json")
    ana = node_certificate(tmp_path, name="ana", crew=crew)
    nodes.add("ana", certificate=ana)
    owner = {"pid": os.getppid(), "host": socket.gethostname()}
    (tmp_path / "nodes.json.lock").write_text(json.dumps(owner))
    with pytest.raises(ConfigError, match="is in use"):
        nodes.remove("ana")
    assert nodes.name_of(ana) == "ana"
