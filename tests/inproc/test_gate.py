"""The crew's one port: what comes in goes to the server behind it, and strangers take no seat that others need."""

import contextlib
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.host.card import near, read_cards
from cuadrilla.link import gate as gate_module
from cuadrilla.link.gate import (
    BEGUN_AT_ONCE,
    BEGUN_PER_SECOND,
    MAX_OF_A_NODE,
    MAX_STRANGERS,
    MAX_STRANGERS_OF_AN_ADDRESS,
    NEW_AT_ONCE,
    SILENT_SECONDS,
    STRANGER_SECONDS,
    Gate,
    bind,
)
from tests.commands import wait_for

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs sockets of the file system")

PATIENCE_SECONDS = 20.0


class Echo(socketserver.ThreadingUnixStreamServer):
    """Stands where gRPC does: sends back what it gets, and knows by which names its callers have come."""

    daemon_threads = False

    def __init__(self, path: str) -> None:
        self.peers: list[str] = []
        super().__init__(path, _EchoHandler)


class _EchoHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Echo)
        self.server.peers.append(f"unix:{self.client_address}")
        with contextlib.suppress(OSError):
            while data := self.request.recv(2**16):
                self.request.sendall(data)


class Guarded:
    """A gate with an echo behind it, and callers at any address of the loopback."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gate = Gate(clock=lambda: self.now)
        self.echo = Echo(self.gate.inner_address.removeprefix("unix:"))
        self.thread = threading.Thread(target=self.echo.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        self.port = self.gate.open(bind("127.0.0.1:0"), inner_port=0)
        self.callers: list[socket.socket] = []

    def call(self, host: str = "127.0.0.1") -> socket.socket:
        caller = socket.create_connection(("127.0.0.1", self.port), PATIENCE_SECONDS, source_address=(host, 0))
        self.callers.append(caller)
        return caller

    def close(self) -> None:
        for caller in self.callers:
            caller.close()
        self.gate.close()
        self.echo.shutdown()
        self.thread.join()
        self.echo.server_close()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.close()


def answered(caller: socket.socket) -> bool:
    """Whether it is served; False when it was hung up on."""
    try:
        caller.sendall(b"hola")
        return caller.recv(100) == b"hola"
    except ConnectionError:
        return False


def is_hung_up(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionError:
        return True


def is_turned_away(guarded: Guarded, host: str) -> bool:
    """Hung up on, perhaps before it knows that it was connected."""
    try:
        return is_hung_up(guarded.call(host))
    except ConnectionResetError:
        return True


def test_everything_arrives_although_neither_side_reads_at_first(guarded: Guarded) -> None:
    """30 MB there and back: more than any buffer on the way holds, so the gate has to wait for both."""
    caller, block = guarded.call(), bytes(range(256)) * 4096
    sender = threading.Thread(target=lambda: [caller.sendall(block) for _ in range(30)])
    sender.start()
    received = 0
    while received < 30 * len(block):
        data = caller.recv(2**16)
        first = received % 256
        assert data[:256] == (block[first:] + block)[: len(data[:256])]
        received += len(data)
    sender.join()


def test_the_end_of_one_side_reaches_the_other(guarded: Guarded) -> None:
    caller = guarded.call()
    caller.sendall(b"adios")
    caller.shutdown(socket.SHUT_WR)
    assert caller.recv(100) == b"adios"
    assert caller.recv(100) == b""


def test_who_takes_all_seats_keeps_nobody_out_who_comes_from_elsewhere(guarded: Guarded) -> None:
    """Silent ones, as many as there are seats, from as few addresses as that takes."""
    hosts = [f"127.0.0.{number}" for number in range(2, 2 + MAX_STRANGERS // MAX_STRANGERS_OF_AN_ADDRESS)]
    silent = [guarded.call(host) for host in hosts for _ in range(MAX_STRANGERS_OF_AN_ADDRESS)]
    assert is_turned_away(guarded, hosts[0])  # that address has had its share
    newcomers = [guarded.call(f"127.0.1.{number}") for number in range(1, 9)]
    assert all(answered(newcomer) for newcomer in newcomers)
    assert sum(is_hung_up(each) for each in silent[:1]) == 1  # the oldest of those who have most made room
    assert all(answered(newcomer) for newcomer in newcomers)


@pytest.mark.parametrize(("said", "seconds"), [(b"", SILENT_SECONDS), (b"hola", STRANGER_SECONDS)])
def test_a_stranger_does_not_last(guarded: Guarded, said: bytes, seconds: float) -> None:
    caller = guarded.call()
    caller.sendall(said)
    assert caller.recv(100) == said if said else True
    wait_for(lambda: guarded.gate._strangers() != [])
    guarded.now = seconds - 0.1
    caller.settimeout(0.6)
    with pytest.raises(TimeoutError):
        caller.recv(1)
    guarded.now = seconds + 0.1
    caller.settimeout(PATIENCE_SECONDS)
    assert is_hung_up(caller)


def test_a_node_that_is_known_needs_no_seat_and_stays(guarded: Guarded) -> None:
    known = guarded.call()
    assert answered(known)
    guarded.gate.know(guarded.echo.peers[0], "ana")
    assert guarded.gate.host_of(guarded.echo.peers[0]) == "127.0.0.1"
    for number in range(MAX_STRANGERS):
        guarded.call(f"127.0.2.{1 + number}")
    guarded.now = 10 * STRANGER_SECONDS
    assert answered(guarded.call("127.0.3.1"))
    assert answered(known)


def test_of_too_many_connections_of_a_node_the_newest_stay_until_it_is_forgotten(guarded: Guarded) -> None:
    """Those behind a cable that was pulled are still there for the kernel: they must not keep the node out."""
    callers = []
    for number in range(MAX_OF_A_NODE + 3):  # known one by one: strangers of one address have fewer seats
        callers.append(guarded.call())
        assert answered(callers[-1])
        guarded.gate.know(guarded.echo.peers[number], "ana")
    assert all(is_hung_up(caller) for caller in callers[:3])
    assert all(answered(caller) for caller in callers[3:])
    guarded.gate.forget_all_but(["ana"])
    guarded.now += 10 * STRANGER_SECONDS
    assert all(answered(caller) for caller in callers[3:])
    guarded.gate.forget_all_but(["luis"])
    assert all(answered(caller) for caller in callers[3:])  # it may still read why
    guarded.now += STRANGER_SECONDS + 1.0
    assert all(is_hung_up(caller) for caller in callers[3:])


def test_an_address_that_connects_without_end_is_slowed_down_alone(guarded: Guarded) -> None:
    served = [is_served(guarded, "127.0.0.9") for _ in range(int(NEW_AT_ONCE) + 20)]
    assert served == [True] * int(NEW_AT_ONCE) + [False] * 20
    assert is_served(guarded, "127.0.0.8")
    guarded.now += 1.0
    assert is_served(guarded, "127.0.0.9")


def test_many_addresses_together_are_slowed_down_and_a_newcomer_is_not(guarded: Guarded) -> None:
    """Each of them stays below its own pace."""
    hosts = [f"127.0.1.{number}" for number in range(1, 9)]
    for number in range(int(BEGUN_AT_ONCE)):
        assert is_served(guarded, hosts[number % len(hosts)])
    wait_for(lambda: not guarded.gate._connections)  # their seats are free again
    waiting = [guarded.call(host) for host in hosts]
    for caller in waiting:
        caller.sendall(b"hello")
    wait_for(lambda: len(guarded.gate._waiting) == len(hosts))
    newcomer = guarded.call("127.0.0.1")
    newcomer.sendall(b"hello")
    wait_for(lambda: len(guarded.gate._waiting) == len(hosts) + 1)
    assert len(guarded.echo.peers) == BEGUN_AT_ONCE
    guarded.now += 1.01 / BEGUN_PER_SECOND
    assert newcomer.recv(5) == b"hello"
    assert len(guarded.echo.peers) == BEGUN_AT_ONCE + 1
    for _ in range(10 * (len(hosts) + 1)):  # looked at often, while there is not yet a whole turn
        guarded.now += 0.1 / BEGUN_PER_SECOND
        guarded.gate._do(lambda: None)
        time.sleep(0.01)
    assert all(caller.recv(5) == b"hello" for caller in waiting)


def is_served(guarded: Guarded, host: str) -> bool:
    """A connection that is closed again at once."""
    try:
        with guarded.call(host) as caller:
            return answered(caller)
    except ConnectionError:
        return False


def test_another_address_while_it_runs(guarded: Guarded) -> None:
    """Those who are there stay; newcomers find it at either, since the old one may come back."""
    before = guarded.call()
    assert answered(before)
    port = guarded.gate.listen(bind("127.0.0.5:0"))
    with socket.create_connection(("127.0.0.5", port), PATIENCE_SECONDS) as caller:
        assert answered(caller)
    assert answered(guarded.call())
    assert answered(before)


# The port


def test_a_port_where_another_program_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        began = time.monotonic()
        with pytest.raises(LinkError, match="cannot listen on") as caught:
            bind(f"127.0.0.1:{other.getsockname()[1]}")
        assert "another program has that port" in caught.value.hint
    assert time.monotonic() - began < gate_module.BIND_SECONDS / 2


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(LinkError, match="this machine has no such address") as caught:
        bind("192.0.2.1:0")
    assert all(address in caught.value.hint for address in near(read_cards()))


@contextlib.contextmanager
def connected_to_itself() -> Iterator[socket.socket]:
    """What a worker that dials a dead coordinator's port on its own machine may end up with: the port, taken."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        yield own


def test_a_port_that_nobody_listens_at_is_waited_for() -> None:
    with connected_to_itself() as own:
        port = own.getsockname()[1]
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # else it stays for a minute
        waiting = threading.Event()
        got: list[int] = []

        def wait() -> None:
            waiting.set()
            with bind(f"127.0.0.1:{port}") as listener:
                got.append(listener.getsockname()[1])

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(PATIENCE_SECONDS)
        thread.join(timeout=1.0)
        assert got == []  # not while it is taken
    thread.join()
    assert got == [port]


def test_a_port_that_stays_taken_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "BIND_SECONDS", 0.5)
    with connected_to_itself() as own, pytest.raises(LinkError, match="stays in use although nobody listens"):
        bind(f"127.0.0.1:{own.getsockname()[1]}")


def test_the_folder_of_a_killed_one_is_removed() -> None:
    """By the next gate, which is that of the coordinator that takes its place."""
    code = (
        "import os; from cuadrilla.link.gate import Gate\n"
        "gate = Gate(); print(gate._folder, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    left = Path(killed.stdout.strip())
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    gate = Gate()
    assert not left.exists()
    of_a_living_one = gate._folder
    Gate().close()
    assert of_a_living_one.exists()
    gate.close()
    assert not of_a_living_one.exists()
