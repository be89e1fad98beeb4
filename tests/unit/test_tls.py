"""Keys and certificates in real files: made once, private, checked at every start; hostile requests refused."""

import os
import ssl
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cuadrilla.link.tls import (
    ENROL_CERTIFICATE,
    CoordinatorKeys,
    enrol_identity,
    is_of_coordinator,
    key_hash,
    load_node,
    node_request,
    open_coordinator,
    save_node,
)
from tests.crews import NOW, join, pem_of, refused, request_with

pytestmark = pytest.mark.unit

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX file modes")


@pytest.fixture
def crew(tmp_path: Path) -> CoordinatorKeys:
    return open_coordinator(tmp_path / "crew", now=NOW)


# Files


def test_the_same_keys_at_every_start(tmp_path: Path, crew: CoordinatorKeys) -> None:
    again = open_coordinator(tmp_path / "crew", now=NOW + timedelta(days=4000))
    assert again.identity == crew.identity
    assert key_hash(again.identity.certificate) == key_hash(crew.identity.certificate)
    other = open_coordinator(tmp_path / "other", now=NOW)
    assert key_hash(other.identity.certificate) != key_hash(crew.identity.certificate)


def test_dates_forgive_clocks(crew: CoordinatorKeys, tmp_path: Path) -> None:
    node = join(tmp_path / "node", name="ana", crew=crew)
    for pem in (crew.identity.ca, crew.identity.certificate, node.certificate):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc == (NOW - timedelta(hours=48)).replace(microsecond=0)
        assert certificate.not_valid_after_utc.year == 9999


@posix
def test_private_keys_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        crew = open_coordinator(tmp_path / "crew", now=NOW)
        join(tmp_path / "node", name="ana", crew=crew)
    finally:
        os.umask(before)
    for file in ("crew/ca.key", "crew/server.key", "node/node.key"):
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600
    for folder in ("crew", "node"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    assert {file.name for file in (tmp_path / "crew").iterdir()} == {"ca.key", "ca.pem", "server.key", "server.pem"}
    assert {file.name for file in (tmp_path / "node").iterdir()} == {"node.key", "node.pem", "crew.pem"}


def test_no_repr_shows_a_key(crew: CoordinatorKeys, tmp_path: Path) -> None:
    node = join(tmp_path / "node", name="ana", crew=crew)
    for thing in (crew, crew.identity, node, enrol_identity(crew.identity.certificate)):
        assert "PRIVATE" not in repr(thing)


def start(folder: Path) -> Callable[[], object]:
    """What a program does first: the coordinator's in `crew`, a node's in `node`."""
    if folder.name == "crew":
        return lambda: open_coordinator(folder, now=NOW)
    return lambda: load_node(folder)


@posix
@pytest.mark.parametrize("file", ["crew/ca.key", "crew/server.key", "node/node.key"])
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o666, 0o601])
def test_a_key_open_to_others(tmp_path: Path, crew: CoordinatorKeys, file: str, mode: int) -> None:
    join(tmp_path / "node", name="ana", crew=crew)
    path = tmp_path / file
    path.chmod(mode)
    error = refused(start(path.parent))
    assert f"mode 0{mode:o}" in error.message
    assert error.hint == f"chmod 600 {path}"
    path.chmod(0o600)
    start(path.parent)()


@pytest.mark.parametrize("file", ["ca.key", "ca.pem", "server.key", "server.pem"])
@pytest.mark.parametrize(("content", "word"), [(None, "missing"), (b"", "empty"), (b"\n", "empty"), (b"xyz", "hold")])
def test_a_damaged_coordinator(
    tmp_path: Path, crew: CoordinatorKeys, file: str, content: bytes | None, word: str
) -> None:
    damage(tmp_path / "crew" / file, content)
    assert word in refused(start(tmp_path / "crew")).message
    assert file in refused(start(tmp_path / "crew")).message


@pytest.mark.parametrize("file", ["node.key", "node.pem", "crew.pem"])
@pytest.mark.parametrize(("content", "word"), [(None, "missing"), (b"", "empty"), (b"\xff\x00", "hold")])
def test_a_damaged_node(tmp_path: Path, crew: CoordinatorKeys, file: str, content: bytes | None, word: str) -> None:
    join(tmp_path / "node", name="ana", crew=crew)
    damage(tmp_path / "node" / file, content)
    assert word in refused(start(tmp_path / "node")).message


def damage(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        ("crew/ca.key", "crew/server.key", "do not belong together"),
        ("crew/ca.pem", "crew/server.pem", "do not belong together"),
        ("crew/server.key", "node/node.key", "do not belong together"),
        ("crew/ca.key", "other/ca.key", "do not belong together"),
        ("node/node.pem", "other/server.pem", "do not belong together"),
        ("node/crew.pem", "other/ca.pem", "was not signed by"),
    ],
)
def test_swapped(tmp_path: Path, crew: CoordinatorKeys, one: str, other: str, word: str) -> None:
    join(tmp_path / "node", name="ana", crew=crew)
    open_coordinator(tmp_path / "other", now=NOW)
    first, second = (tmp_path / one).read_bytes(), (tmp_path / other).read_bytes()
    (tmp_path / one).write_bytes(second)
    (tmp_path / other).write_bytes(first)
    assert word in refused(start((tmp_path / one).parent)).message


def test_a_server_of_another_crew(tmp_path: Path, crew: CoordinatorKeys) -> None:
    open_coordinator(tmp_path / "other", now=NOW)
    for file in ("server.key", "server.pem"):
        (tmp_path / "other" / file).replace(tmp_path / "crew" / file)
    assert "was not signed by" in refused(start(tmp_path / "crew")).message


def test_a_key_of_another_kind(tmp_path: Path, crew: CoordinatorKeys) -> None:
    path = tmp_path / "crew" / "server.key"
    for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
        path.write_bytes(pem_of(key))
        refused(start(tmp_path / "crew"))


# Requests and answers


def test_joining_again_keeps_the_key(tmp_path: Path, crew: CoordinatorKeys) -> None:
    """An answer that got lost: the node asks again, and is the same node."""
    first = join(tmp_path / "node", name="ana", crew=crew)
    again = join(tmp_path / "node", name="ana", crew=crew)
    assert key_hash(first.certificate) == key_hash(again.certificate)
    assert load_node(tmp_path / "node") == again


def test_a_request_holds_no_private_key(tmp_path: Path) -> None:
    request = node_request(tmp_path / "node", name="ana")
    assert b"PRIVATE" not in request
    number = load_number(tmp_path / "node" / "node.key")
    assert number not in x509.load_pem_x509_csr(request).public_bytes(serialization.Encoding.DER)


def load_number(path: Path) -> bytes:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.private_numbers().private_value.to_bytes(32, "big")


def test_hostile_requests(crew: CoordinatorKeys) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    good = request_with(key, "ana")
    assert crew.sign(good)[0] == "ana"
    der = bytearray(x509.load_pem_x509_csr(good).public_bytes(serialization.Encoding.DER))
    der[der.index(b"ana")] = ord("e")  # the name changed on the way: the signature is no longer right
    forged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    hostile = [
        b"",
        b"\x00" * 100,
        good[:-40],
        b"x" * (4 << 20),
        forged,
        request_with(key),
        request_with(key, "ana", "luis"),
        request_with(key, "Ana"),
        request_with(key, "../ana"),
        request_with(key, "ana\x1b[2J"),
        request_with(rsa.generate_private_key(65537, 2048), "ana"),
        request_with(ec.generate_private_key(ec.SECP384R1()), "ana"),
        crew.identity.certificate,
    ]
    for request in hostile:
        refused(lambda request=request: crew.sign(request))


def test_an_answer_that_does_not_fit_is_not_kept(tmp_path: Path, crew: CoordinatorKeys) -> None:
    folder = tmp_path / "node"
    other = open_coordinator(tmp_path / "other", now=NOW)
    _, mine = crew.sign(node_request(folder, name="ana"))
    _, of_other_crew = other.sign(node_request(folder, name="ana"))
    _, of_other_key = crew.sign(node_request(tmp_path / "luis", name="luis"))
    ca, server = crew.identity.ca, crew.identity.certificate
    for certificate, authority in [(of_other_key, ca), (of_other_crew, ca), (mine, other.identity.ca), (b"", ca)]:
        refused(lambda c=certificate, a=authority: save_node(folder, certificate=c, ca=a, server=server))
    refused(lambda: save_node(folder, certificate=mine, ca=ca, server=other.identity.certificate))
    assert {file.name for file in folder.iterdir()} == {"node.key"}


def test_one_folder_may_hold_both_roles(tmp_path: Path, crew: CoordinatorKeys) -> None:
    """A coordinator's machine that works in another crew keeps its own CA."""
    other = open_coordinator(tmp_path / "other", now=NOW)
    join(tmp_path / "crew", name="ana", crew=other)
    assert open_coordinator(tmp_path / "crew", now=NOW).identity == crew.identity


def test_what_calls_itself_a_coordinator(crew: CoordinatorKeys) -> None:
    assert is_of_coordinator(ssl.PEM_cert_to_DER_cert(crew.identity.certificate.decode()))
    assert not is_of_coordinator(ssl.PEM_cert_to_DER_cert(crew.identity.ca.decode()))
    assert not is_of_coordinator(ssl.PEM_cert_to_DER_cert(ENROL_CERTIFICATE.decode()))
    assert not is_of_coordinator(b"\x30\x00")
