"""The server's key is compared with the invite, over real TLS sockets, before any secret is sent."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import token_bytes

import pytest

from cuadrilla.crew.enrol import enrol, host_name
from cuadrilla.home import Home
from cuadrilla.link.address import Address
from cuadrilla.link.base import Refused
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import Identity, key_hash, load_node, open_coordinator, pinned_certificate
from cuadrilla.link.invite import SECRET_BYTES, Invite
from tests.crews import refused
from tests.hostile import Crew

CALL_SECONDS = 20.0


@pytest.fixture
def crew(tmp_path: Path) -> Identity:
    return open_coordinator(tmp_path / "crew")


@contextmanager
def server(talk: Callable[[socket.socket], object]) -> Iterator[tuple[int, list[object]]]:
    """Serve one connection on the loopback with `talk`, in a thread. Yields the port and the result of `talk`."""
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


def tls_server(folder: Path) -> Callable[[socket.socket], object]:
    """Show the certificate in `folder`, and return what the client sends after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    keys, pem = open_coordinator(folder), folder / "server.pem"
    pem.write_bytes(keys.certificate + keys.key)
    context.load_cert_chain(pem)

    def talk(connection: socket.socket) -> object:
        with context.wrap_socket(connection, server_side=True) as secure:
            return secure.recv(100)

    return talk


def invite_to(port: int, *, crew: Identity) -> Invite:
    hashed = key_hash(crew.certificate)
    return Invite(address=Address("127.0.0.1", port), key_hash=hashed, secret=token_bytes(SECRET_BYTES))


def test_another_crew_or_somebody_in_between(tmp_path: Path, crew: Identity) -> None:
    """The certificate of the impostor has the right name and dates, and another key."""
    open_coordinator(tmp_path / "impostor")
    with server(tls_server(tmp_path / "impostor")) as (port, heard):
        error = refused(lambda: pinned_certificate(invite_to(port, crew=crew)))
    assert "nothing secret was sent" in error.message
    assert heard == [b""]


def test_another_program_on_the_port(crew: Identity) -> None:
    def talk(connection: socket.socket) -> object:
        connection.recv(4096)
        connection.sendall(b"SSH-2.0-OpenSSH_9.7\r\n")
        return connection.recv(4096)

    with server(talk) as (port, _):
        assert f"127.0.0.1:{port}" in refused(lambda: pinned_certificate(invite_to(port, crew=crew))).message


def test_nobody_answers(crew: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts, and no program answers
        invite = invite_to(listener.getsockname()[1], crew=crew)
        assert "timed out" in refused(lambda: pinned_certificate(invite, timeout_seconds=0.05)).message


def test_an_impostor_after_the_pinning_hears_nothing(tmp_path: Path, crew: Identity) -> None:
    """The certificate is fetched over one connection; the call's connection trusts only the compared certificate."""
    impostor = Crew(tmp_path / "impostor")
    try:
        with closing(Connection(impostor.address, identity=Identity(certificate=crew.certificate))) as connection:
            error = refused(lambda: connection.enroll("luis", secret=token_bytes(SECRET_BYTES)))
        assert "cannot be reached" in error.message
        assert list(impostor.nodes.nodes()) == ["ana"]
    finally:
        impostor.close()


def test_joining(tmp_path: Path) -> None:
    """A complete enrolment. With another invite the same machine keeps its name, and its old token becomes invalid."""
    crew, home = Crew(tmp_path), Home(tmp_path / "home")
    hashed = key_hash(crew.keys.certificate)
    try:
        for name in ("", "eva"):
            secret = crew.server.invites.issue(uses=1)
            text = str(Invite(address=Address("127.0.0.1", crew.port), key_hash=hashed, secret=secret))
            before = [load_node(joined.folder) for joined in home.joined()]
            joined = enrol(home, text, address="", name=name, report=lambda _: None)
            with closing(Connection(joined.address, identity=load_node(joined.folder))) as connection:
                assert connection.describe().config
            assert joined.name == (name or host_name())
            assert sorted(crew.nodes.nodes()) == sorted(["ana", joined.name])
            assert [crew.nodes.name_of(identity.token) for identity in before] == [None] * len(before)
        assert len(before) == 1
        with pytest.raises(Refused, match="has been used"):
            enrol(home, text, address="", name="luis", report=lambda _: None)
        assert load_node(joined.folder)  # its identity is still there
    finally:
        crew.close()
