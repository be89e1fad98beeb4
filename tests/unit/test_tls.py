"""Keys, certificates and tokens in real files: made once, private, checked at every start."""

import json
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import Enrolled
from cuadrilla.link.identity import (
    CoordinatorKeys,
    Identity,
    is_of_coordinator,
    key_hash,
    load_node,
    new_token,
    open_coordinator,
    save_node,
)
from cuadrilla.link.nodes import AllowList
from tests.crews import join, refused

pytestmark = pytest.mark.unit

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX file modes")
PRIVATE = ("crew/coordinator.json", "node/node.json")


@pytest.fixture
def crew(tmp_path: Path) -> CoordinatorKeys:
    """A coordinator in `crew`, and a node of it in `node`."""
    keys = open_coordinator(tmp_path / "crew")
    join(tmp_path / "node", name="ana", crew=keys, nodes=AllowList(tmp_path / "nodes.json"))
    return keys


def start(folder: Path) -> Callable[[], object]:
    return (lambda: open_coordinator(folder)) if folder.name == "crew" else (lambda: load_node(folder))


def test_the_same_keys_at_every_start(tmp_path: Path, crew: CoordinatorKeys) -> None:
    assert open_coordinator(tmp_path / "crew") == crew
    assert key_hash(open_coordinator(tmp_path / "other").certificate) != key_hash(crew.certificate)
    assert load_node(tmp_path / "node").certificate == crew.certificate


def test_no_clock_can_be_wrong(crew: CoordinatorKeys) -> None:
    certificate = x509.load_pem_x509_certificate(crew.certificate)
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (2000, 9999)


@posix
def test_secrets_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_node(tmp_path / "node", token=new_token(), certificate=open_coordinator(tmp_path / "crew").certificate)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / file).stat().st_mode) for file in PRIVATE] == [0o600, 0o600]
    assert [stat.S_IMODE((tmp_path / folder).stat().st_mode) for folder in ("crew", "node")] == [0o700, 0o700]
    assert {file.name for file in (tmp_path / "crew").iterdir()} == {"coordinator.json"}


def test_nothing_secret_is_shown(tmp_path: Path, crew: CoordinatorKeys) -> None:
    node = load_node(tmp_path / "node")
    assert "PRIVATE KEY" not in repr(crew)
    assert node.token not in repr(node)


@posix
@pytest.mark.parametrize("file", PRIVATE)
def test_a_secret_that_others_can_read(tmp_path: Path, crew: CoordinatorKeys, file: str) -> None:
    (tmp_path / file).chmod(0o640)
    error = refused(start((tmp_path / file).parent))
    assert "open to other users (mode 0640)" in error.message
    assert "chmod 600" in error.hint


@pytest.mark.parametrize("file", PRIVATE)
@pytest.mark.parametrize("content", [" \n", "hola", "[]", "{}", '{"key": 1, "certificate": "x", "token": null}'])
def test_damaged(tmp_path: Path, crew: CoordinatorKeys, file: str, content: str) -> None:
    path = tmp_path / file
    path.write_text(content)
    error = refused(start(path.parent))
    assert f"{path} is empty, or does not hold" in error.message


@pytest.mark.parametrize("field", ["key", "certificate", "token"])
def test_a_part_that_is_none(tmp_path: Path, crew: CoordinatorKeys, field: str) -> None:
    path = tmp_path / ("crew/coordinator.json" if field == "key" else "node/node.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: "hola"}))
    assert "does not hold" in refused(start(path.parent)).message


def test_a_node_that_has_joined_nothing(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(start(tmp_path / "node")).message


@pytest.mark.parametrize(
    "key",
    [
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP256R1()),
    ],
)
def test_a_certificate_of_another_key(tmp_path: Path, crew: CoordinatorKeys, key: rsa.RSAPrivateKey) -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path, raw = tmp_path / "crew" / "coordinator.json", key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": raw.decode()}))
    assert "does not hold a private key and its certificate" in refused(start(tmp_path / "crew")).message


@pytest.mark.parametrize("token", ["", "x", 44 * "x", 42 * "x" + "\n", 42 * "x" + "é"])
def test_an_answer_that_holds_no_token_is_none(token: str) -> None:
    with pytest.raises(LinkError, match="cannot be used"):
        wire.decode(f"Enrolled {json.dumps({'name': 'ana', 'token': token})}".encode(), Enrolled)
    assert wire.decode(wire.encode(Enrolled(name="ana", token=new_token())), Enrolled)


def test_a_token_has_256_random_bits() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {43}


def test_one_folder_may_hold_both_roles(tmp_path: Path, crew: CoordinatorKeys) -> None:
    """A coordinator's machine that works in another crew keeps its own key."""
    other = open_coordinator(tmp_path / "other")
    node = save_node(tmp_path / "crew", token=new_token(), certificate=other.certificate)
    assert open_coordinator(tmp_path / "crew") == crew
    assert isinstance(node, Identity)
    assert node.certificate == other.certificate


def test_what_calls_itself_a_coordinator(crew: CoordinatorKeys) -> None:
    assert is_of_coordinator(ssl.PEM_cert_to_DER_cert(crew.certificate.decode()))
    assert not is_of_coordinator(b"\x30\x00")
