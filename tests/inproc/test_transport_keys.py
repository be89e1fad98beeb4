"""Who answers and who calls: pinning over real TLS sockets, certificates with a real gRPC server on loopback."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cuadrilla.link.address import Address
from cuadrilla.link.invite import Invite, new_secret
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import (
    SERVER_NAME,
    CoordinatorKeys,
    Identity,
    enrol_identity,
    is_enrol,
    key_hash,
    node_request,
    open_coordinator,
    peer_certificate,
    pinned_certificate,
    save_node,
)
from tests.crews import NOW, join, key_of, pem_of, refused

CALL_SECONDS = 20.0


@pytest.fixture
def crew(tmp_path: Path) -> CoordinatorKeys:
    return open_coordinator(tmp_path / "crew", now=NOW)


# Pinning: who answers is asked before anything secret is said


@contextmanager
def server(talk: Callable[[socket.socket], object]) -> Iterator[tuple[int, list[object]]]:
    """One connection on loopback, served by `talk` in a thread: the port, and what `talk` returned or raised."""
    results: list[object] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(CALL_SECONDS)
            try:
                results.append(talk(connection))
            except OSError as error:
                results.append(error)

    thread = threading.Thread(target=serve, name="test server")
    thread.start()
    try:
        yield listener.getsockname()[1], results
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def tls_server(folder: Path, *, highest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> Callable[[socket.socket], object]:
    """Shows the server certificate in `folder`; returns what the client sent after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.maximum_version = highest

    def talk(connection: socket.socket) -> object:
        with context.wrap_socket(connection, server_side=True) as secure:
            return secure.recv(100)

    return talk


def invite_to(port: int, *, crew: CoordinatorKeys) -> Invite:
    hashed = key_hash(crew.identity.certificate)
    return Invite(address=Address("127.0.0.1", port), key_hash=hashed, secret=new_secret())


def test_the_right_coordinator(tmp_path: Path, crew: CoordinatorKeys) -> None:
    with server(tls_server(tmp_path / "crew")) as (port, heard):
        assert pinned_certificate(invite_to(port, crew=crew)) == crew.identity.certificate
    assert heard == [b""]


def test_another_crew_or_somebody_in_between(tmp_path: Path, crew: CoordinatorKeys) -> None:
    """The impostor has the right name and dates; only the key is another one."""
    open_coordinator(tmp_path / "impostor", now=NOW)
    with server(tls_server(tmp_path / "impostor")) as (port, heard):
        error = refused(lambda: pinned_certificate(invite_to(port, crew=crew)))
    assert "nothing secret was sent" in error.message
    assert heard == [b""]


def test_tls_1_2_is_refused(tmp_path: Path, crew: CoordinatorKeys) -> None:
    with server(tls_server(tmp_path / "crew", highest=ssl.TLSVersion.TLSv1_2)) as (port, heard):
        error = refused(lambda: pinned_certificate(invite_to(port, crew=crew)))
    assert "does not speak TLS 1.3" in error.message
    assert isinstance(heard[0], ssl.SSLError)


@pytest.mark.parametrize(
    "greeting", [b"SSH-2.0-OpenSSH_9.7\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 64, b""]
)
def test_another_program_on_the_port(crew: CoordinatorKeys, greeting: bytes) -> None:
    def talk(connection: socket.socket) -> object:
        connection.recv(4096)
        connection.sendall(greeting)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)

    with server(talk) as (port, _):
        assert f"127.0.0.1:{port}" in refused(lambda: pinned_certificate(invite_to(port, crew=crew))).message


def test_nobody_answers(crew: CoordinatorKeys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts; nobody ever speaks
        invite = invite_to(listener.getsockname()[1], crew=crew)
        error = refused(lambda: pinned_certificate(invite, timeout_seconds=0.05))
        assert "did not answer within 0.05 s" in error.message
    assert "cannot reach" in refused(lambda: pinned_certificate(invite)).message


def test_a_clock_far_behind_is_named(tmp_path: Path) -> None:
    crew = open_coordinator(tmp_path / "crew", now=NOW + timedelta(days=30))
    with server(tls_server(tmp_path / "crew")) as (port, _):
        assert "this machine's clock" in refused(lambda: pinned_certificate(invite_to(port, crew=crew))).message


def test_two_days_of_difference_do_no_harm(tmp_path: Path) -> None:
    crew = open_coordinator(tmp_path / "crew", now=NOW + timedelta(hours=47))
    with server(tls_server(tmp_path / "crew")) as (port, _):
        assert pinned_certificate(invite_to(port, crew=crew)) == crew.identity.certificate


# The same with gRPC: the credentials the link will use


class WhoCalls(grpc.GenericRpcHandler):
    """Answers every call with who it thinks the caller is; `contexts` keeps what gRPC knew."""

    def __init__(self, nodes: AllowList) -> None:
        self.nodes = nodes
        self.contexts: list[dict[str, Any]] = []

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, request: bytes, context: Any) -> bytes:
        self.contexts.append(dict(context.auth_context()))
        certificate = peer_certificate(context.auth_context())
        if certificate is None:
            return b"nobody"
        if is_enrol(certificate):
            return b"enrol"
        return f"node {self.nodes.name_of(certificate)}".encode()


@contextmanager
def grpc_server(credentials: Any, handler: grpc.GenericRpcHandler) -> Iterator[int]:
    with ThreadPoolExecutor(2) as pool:
        running = grpc.server(pool, handlers=[handler])
        port = running.add_secure_port("127.0.0.1:0", credentials)
        running.start()
        try:
            yield port
        finally:
            running.stop(None).wait()


@contextmanager
def crew_server(crew: CoordinatorKeys, handler: WhoCalls) -> Iterator[int]:
    pair = (crew.identity.key, crew.identity.certificate)
    roots = crew.client_roots()
    credentials = grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=True)
    with grpc_server(credentials, handler) as port:
        yield port


def ask(port: int, identity: Identity | None, *, ca: bytes | None = None, name: str = SERVER_NAME) -> str:
    """The answer, or the name of the status code."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=ca or (identity.ca if identity else None),
        private_key=identity.key if identity else None,
        certificate_chain=identity.certificate if identity else None,
    )
    options = [("grpc.ssl_target_name_override", name)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        try:
            return channel.unary_unary("/cuadrilla.Test/Ask")(b"a secret", timeout=CALL_SECONDS).decode()
        except grpc.RpcError as error:
            return error.code().name


REFUSED = "UNAVAILABLE"  # all that gRPC tells a client whose certificate the server does not accept


def test_grpc_knows_who_calls(tmp_path: Path, crew: CoordinatorKeys) -> None:
    nodes = AllowList(tmp_path / "nodes.json")
    handler = WhoCalls(nodes)
    ana, luis = (join(tmp_path / name, name=name, crew=crew) for name in ("ana", "luis"))
    nodes.add("ana", certificate=ana.certificate)
    with crew_server(crew, handler) as port:
        assert ask(port, ana) == "node ana"
        assert ask(port, luis) == "node None"  # a certificate of the crew gives no right by itself
        nodes.remove("ana")
        assert ask(port, ana) == "node None"
        assert ask(port, enrol_identity(crew.identity.certificate)) == "enrol"
    known = handler.contexts[0]
    assert known["x509_common_name"] == [b"ana"]
    assert [key_hash(pem) for pem in known["x509_pem_cert"]] == [key_hash(ana.certificate)]
    assert known["transport_security_type"] == [b"ssl"]
    assert known["security_level"] == [b"TSI_PRIVACY_AND_INTEGRITY"]


def test_grpc_refuses_strangers(tmp_path: Path, crew: CoordinatorKeys) -> None:
    handler = WhoCalls(AllowList(tmp_path / "nodes.json"))
    other = open_coordinator(tmp_path / "other", now=NOW)
    foreign = join(tmp_path / "foreign", name="ana", crew=other)
    with crew_server(crew, handler) as port:
        assert ask(port, foreign, ca=crew.identity.ca) == REFUSED
        assert ask(port, None, ca=crew.identity.ca) == REFUSED
        assert ask(port, signed_by_enrol("ana"), ca=crew.identity.ca) == REFUSED
        assert ask(port, signed_by_node("luis", folder=tmp_path / "ana", crew=crew)) == REFUSED
    assert handler.contexts == []


def test_an_impostor_after_the_pinning_hears_nothing(tmp_path: Path, crew: CoordinatorKeys) -> None:
    """The fetch and the call are two connections: the second one trusts only the certificate that was compared."""
    impostor = open_coordinator(tmp_path / "impostor", now=NOW)
    handler = WhoCalls(AllowList(tmp_path / "nodes.json"))
    with crew_server(impostor, handler) as port:
        assert ask(port, enrol_identity(crew.identity.certificate)) == REFUSED
    assert handler.contexts == []


def test_a_node_cannot_pose_as_the_coordinator(tmp_path: Path, crew: CoordinatorKeys) -> None:
    ana, luis = (join(tmp_path / name, name=name, crew=crew) for name in ("ana", "luis"))
    handler = WhoCalls(AllowList(tmp_path / "nodes.json"))
    credentials = grpc.ssl_server_credentials([(luis.key, luis.certificate)], crew.identity.ca, True)
    with grpc_server(credentials, handler) as port:
        assert ask(port, ana) == REFUSED
        assert ask(port, ana, name="luis") == REFUSED  # its use is that of a client, whatever name is asked for
    assert handler.contexts == []


def test_joining_over_grpc(tmp_path: Path, crew: CoordinatorKeys) -> None:
    """Pin, enrol, join: a whole way in, against the gRPC server itself."""
    nodes = AllowList(tmp_path / "nodes.json")
    with crew_server(crew, WhoCalls(nodes)) as port:
        pinned = pinned_certificate(invite_to(port, crew=crew))
        assert ask(port, enrol_identity(pinned)) == "enrol"
        name, certificate = crew.sign(node_request(tmp_path / "ana", name="ana"))
        nodes.add(name, certificate=certificate)
        identity = save_node(tmp_path / "ana", certificate=certificate, ca=crew.identity.ca, server=pinned)
        assert ask(port, identity) == "node ana"


def signed_by_enrol(name: str) -> Identity:
    """Anybody can make this one: the enrol key is published."""
    enrol = enrol_identity(b"")
    return forge(name, issuer=x509.load_pem_x509_certificate(enrol.certificate), issuer_key=key_of(enrol), chain=b"")


def signed_by_node(name: str, *, folder: Path, crew: CoordinatorKeys) -> Identity:
    """A node that plays CA: its certificate follows in the chain."""
    node = join(folder, name="ana", crew=crew)
    issuer = x509.load_pem_x509_certificate(node.certificate)
    forged = forge(name, issuer=issuer, issuer_key=key_of(node), chain=node.certificate)
    return Identity(key=forged.key, certificate=forged.certificate, ca=crew.identity.ca)


def forge(name: str, *, issuer: x509.Certificate, issuer_key: ec.EllipticCurvePrivateKey, chain: bytes) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=1))
        .sign(issuer_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return Identity(key=pem_of(key), certificate=pem + chain, ca=b"")
