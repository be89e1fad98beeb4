"""Whether a server can listen at an address. If the port is about to become free the check waits for it."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.host.card import near, read_cards
from cuadrilla.link import address
from cuadrilla.link.address import check_free

PATIENCE_SECONDS = 20.0


def test_a_port_where_another_program_listens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "BIND_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(LinkError, match="cannot listen on") as caught:
            check_free(f"127.0.0.1:{other.getsockname()[1]}")
        assert "choose another port" in caught.value.hint


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(LinkError, match="cannot listen on") as caught:
        check_free("192.0.2.1:0")
    assert all(own in caught.value.hint for own in near(read_cards()))


@contextlib.contextmanager
def connected_to_itself() -> Iterator[socket.socket]:
    """A socket that is connected to itself. A worker that dials a dead coordinator on its own machine may get one."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        yield own


def test_a_port_that_nobody_listens_at_is_waited_for() -> None:
    with connected_to_itself() as own:
        port = own.getsockname()[1]
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # else it stays for a minute
        free = threading.Event()
        thread = threading.Thread(target=lambda: check_free(f"127.0.0.1:{port}") or free.set())
        thread.start()
        assert not free.wait(0.5)  # not while it is taken
    assert free.wait(PATIENCE_SECONDS)
    thread.join()
