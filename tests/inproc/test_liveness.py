"""A dead connection must be noticed, and one whose answers are late must stay; at first both look the same."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Hello, Lease
from cuadrilla.link.client import Connection, GrpcLink
from tests.commands import wait_for
from tests.hostile import CEILING_SECONDS, LAYOUT, PARAMETERS, Crew


class Router:
    """Forwards connections to `address`, until it forgets one, or holds all data back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.flows = threading.Event()
        self.flows.set()
        self._forgotten: set[socket.socket] = set()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def forget(self) -> None:
        """Forget all present connections. What is sent on them is lost silently."""
        self._forgotten.update(self._ends)

    def close(self) -> None:
        self.flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in [*self._ends, self._listener]:
            end.close()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                self._start(self._carry, near, far)
                self._start(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                self.flows.wait()
                if source not in self._forgotten:
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def router(crew: Crew) -> Iterator[Router]:
    router = Router(crew.port)
    yield router
    router.close()


@pytest.fixture
def luis(crew: Crew, router: Router) -> Iterator[tuple[Connection, GrpcLink]]:
    """The connection and the session of a worker behind the router."""
    connection = Connection(router.address, identity=crew.node("luis"))
    session = connection.session(parameters=[LAYOUT])
    session.call(Hello(speed_hint=1.0))
    assert isinstance(crew.heard.next("luis"), Hello)
    yield connection, session
    session.close()
    connection.close()


@pytest.fixture
def impatient(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker, not the coordinator, which disconnects clients with more pings."""
    del crew  # it has begun
    monkeypatch.setattr(wire, "PINGS", tuple((name, value // 10) for name, value in wire.PINGS))


@pytest.mark.usefixtures("impatient")
def test_a_forgotten_connection_is_given_up_for_a_new_one(
    crew: Crew, router: Router, luis: tuple[Connection, GrpcLink]
) -> None:
    """No side is told that the connection is dead; TCP would take a quarter of an hour to notice."""
    connection, session = luis
    router.forget()
    with pytest.raises(LinkError, match="cannot be reached"):
        session.next_event()
    with pytest.raises(LinkError):
        session.call(Hello(speed_hint=1.0))
    with contextlib.closing(Connection(router.address, identity=connection.identity)) as another:
        another.describe()
    assert crew.works()


def test_a_coordinator_without_time_is_waited_for(
    crew: Crew, router: Router, luis: tuple[Connection, GrpcLink]
) -> None:
    """Meanwhile there is a call, and heartbeats wait. Afterwards the session goes on where it was."""
    session = luis[1]
    router.flows.clear()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(session.round_trip)
        end = time.monotonic() + 2.5
        wait_for(lambda: time.monotonic() > end)
        router.flows.set()
        assert (asked.result(CEILING_SECONDS) or 0) > 2
    lease = Lease(lease_id=9, version=1, units=(1,), planned_tokens=5)
    crew.server.send("luis", lease)
    assert session.next_event() == lease
    sent = {name: torch.zeros_like(tensor) for name, tensor in PARAMETERS.items()}
    session.call(Contribution(lease_id=9, tokens=5, loss_sum=1.0, tensors=sent))
    assert isinstance(crew.heard.next("luis"), Contribution)
    assert crew.works()
