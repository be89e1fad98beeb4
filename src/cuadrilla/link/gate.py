"""The crew's one port: connections are accepted and counted here, and their bytes handed on to gRPC, behind it.

gRPC cannot be told who may connect: it takes a number of connections in all, and whoever opens that many locks
everybody else out. So it listens on a socket in a private folder, and this is what the network sees. TLS goes through
untouched: who a caller is, gRPC knows, and says so (`know`).

Invariants
* A connection whose caller is not known yet is a stranger. Strangers have `MAX_STRANGERS` seats, `STRANGER_SECONDS`
  each, and every address only a few; whoever is known needs none. When all are taken, the oldest of the address that
  has most of them makes room: nobody who has fewer addresses than there are seats can keep a newcomer out.
* A silent connection costs a seat and a file descriptor, no thread and no buffer.
* What one side does not read is read from the other side only up to `BLOCK_BYTES`.
* An address gets `NEW_PER_SECOND` new connections, after a burst of `NEW_AT_ONCE`.
* The handshakes that follow cost more here than there. All addresses together begin `BEGUN_PER_SECOND`, after a burst
  of `BEGUN_AT_ONCE`; beyond that they take turns, first whose address has begun fewest of late. So a newcomer waits for
  no more than those who have a seat.
* A node has at most `MAX_OF_A_NODE` connections, the newest; those of one that was kicked are a stranger's.

One thread does it all. Copying costs about 0.13 s of a core for each second at 1 Gb/s (`python -m bench.link`).
"""

import errno
import itertools
import logging
import os
import selectors
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from cuadrilla.errors import LinkError
from cuadrilla.host.card import near, read_cards
from cuadrilla.link.address import Address
from cuadrilla.link.names import MAX_DEVICES
from cuadrilla.link.rate_limit import RateLimit
from cuadrilla.messages import Message
from cuadrilla.rundir import private_folder

MAX_STRANGERS = 64
MAX_STRANGERS_OF_AN_ADDRESS = 16
STRANGER_SECONDS = 15.0
"""Long enough for TLS and the first call on a bad line; an enrolment takes two connections of a second each."""
SILENT_SECONDS = 5.0
"""For its first byte."""
NEW_PER_SECOND, NEW_AT_ONCE = 20.0, 60.0
"""Of one address, which may be that of a router with a classroom behind it."""
BEGUN_PER_SECOND, BEGUN_AT_ONCE = 20.0, 120.0
"""A large crew that comes back begins at once."""
OF_LATE_SECONDS = 60.0
TURN_SECONDS = 0.05
MAX_OF_A_NODE = 2 * MAX_DEVICES
"""One for each of its workers, and one more of each while a newer one takes over."""
DEAD_SECONDS = 60
"""What is sent and not confirmed for so long goes to nobody."""
BLOCK_BYTES = 2**18
BACKLOG = 128
BIND_SECONDS = 15.0
BIND_PAUSE_SECONDS = 0.2
LOOK_SECONDS = 0.25
PREFIX = "cuadrilla-gate-"
LONGEST_PATH = 80  # of a socket: the kernel's limit is 107 on Linux and 103 on macOS, and names are added

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Half:
    """One direction of a connection: what was read from `source` and `target` has not taken yet."""

    source: socket.socket
    target: socket.socket
    waiting: memoryview = field(default_factory=lambda: memoryview(b""))
    ended: bool = False


@dataclass(eq=False)
class _Connection:
    """`name` is what gRPC calls it; empty until the caller has said something and the inner side is open."""

    outer: socket.socket
    host: str
    since: float
    name: str = ""
    node: str = ""
    halves: tuple[_Half, ...] = ()

    @property
    def sockets(self) -> Iterator[socket.socket]:
        yield self.outer
        if self.halves:
            yield self.halves[0].target


class Gate:
    """Hands connections on to `server`, the address at which gRPC listens (`inner_address`). Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._private = ExitStack()
        self._folder = self._private.enter_context(private_folder(PREFIX, where=_short_folder()))
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Connection] = {}
        self._by_name: dict[str, _Connection] = {}
        self._pace = RateLimit(per_second=NEW_PER_SECOND, at_once=NEW_AT_ONCE)
        self._turns, self._turns_at = BEGUN_AT_ONCE, 0.0
        self._begun: Counter[str] = Counter()
        self._begun_since = 0.0
        self._waiting: list[_Connection] = []
        self._listeners: list[socket.socket] = []
        self._todo: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._inner = ""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)

    # -- for the server ------------------------------------------------------------------------------------------------

    @property
    def inner_address(self) -> str:
        """Where gRPC is to listen. Python has no such sockets on Windows: there it is a port of the loopback."""
        return "127.0.0.1:0" if sys.platform == "win32" else f"unix:{self._folder / 'server'}"

    def open(self, listener: socket.socket, *, inner_port: int) -> int:
        """Take connections of `listener` (`bind`) from now on; returns its port.

        `inner_port`: the one that gRPC has told for `inner_address`.
        """
        self._inner = f"127.0.0.1:{inner_port}" if sys.platform == "win32" else str(self._folder / "server")
        port = self.listen(listener)
        self._thread.start()
        return port

    def listen(self, listener: socket.socket) -> int:
        """Take connections there, too; returns its port."""
        listener.setblocking(False)
        port: int = listener.getsockname()[1]

        def add() -> None:
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept(listener))

        self._do(add)
        return port

    @property
    def direct_address(self) -> str:
        """For worker processes of this machine and user: past the gate, so that no change of network reaches them."""
        return self._inner if sys.platform == "win32" else f"unix:{self._inner}"

    def know(self, peer: str, node: str) -> None:
        """The caller that gRPC calls `peer` has proved to be this node."""
        with self._lock:
            connection = self._by_name.get(peer)
            if connection is None or connection.node == node:  # a worker of this machine, or known already
                return
            connection.node = node
            all_of_it = [connection for connection in self._by_name.values() if connection.node == node]
        for connection in all_of_it[:-MAX_OF_A_NODE]:
            self._do(partial(self._end, connection))

    def forget_all_but(self, nodes: Collection[str]) -> None:
        """Connections of any other node are a stranger's again, who has just come: it may still read why."""
        with self._lock:
            for connection in self._by_name.values():
                if connection.node and connection.node not in nodes:
                    connection.node, connection.since = "", self._clock()

    def host_of(self, peer: str) -> str:
        """The address from which a caller has come, as the network sees it; empty for one of this machine."""
        with self._lock:
            connection = self._by_name.get(peer)
        return connection.host if connection else ""

    def close(self) -> None:
        """End all connections and close the port. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._do(lambda: None)
            if self._thread.is_alive():
                self._thread.join()
            self._tidy()

    # -- the one thread ------------------------------------------------------------------------------------------------

    def _do(self, act: Callable[[], None]) -> None:
        """Have the thread do it; before it runs, at once."""
        with self._lock:
            self._todo.append(act)
        with suppress(OSError):
            self._wake.send(b".")

    def _run(self) -> None:
        looked = 0.0
        while not self._closed:
            for key, events in self._selector.select(timeout=TURN_SECONDS if self._waiting else LOOK_SECONDS):
                key.data(events)
            self._take_turns(self._clock())
            if monotonic() - looked >= LOOK_SECONDS:
                looked = monotonic()
                self._end_old_strangers(self._clock())

    def _drain(self, _events: int) -> None:
        self._woken.recv(4096)
        with self._lock:
            todo, self._todo = self._todo, []
        for act in todo:
            act()

    def _accept(self, listener: socket.socket) -> None:
        try:
            outer, peer = listener.accept()
        except OSError:  # it has gone again, or there are no file descriptors: strangers' ones will be free soon
            return
        connection = _Connection(outer, host=str(peer[0]), since=self._clock())
        if not self._pace.admits(connection.host, connection.since) or not self._has_seat(connection):
            _reset(outer)
            return
        _tune(outer)
        self._connections[outer] = connection
        self._selector.register(outer, selectors.EVENT_READ, lambda _: self._wait_for_turn(connection))

    def _has_seat(self, newcomer: _Connection) -> bool:
        """Whether a stranger finds a seat; where all are taken one of the address with most of them is freed."""
        strangers = self._strangers()
        of_address = Counter(stranger.host for stranger in strangers)
        if of_address[newcomer.host] >= MAX_STRANGERS_OF_AN_ADDRESS:
            return False
        if len(strangers) >= MAX_STRANGERS:
            greedy, seats = of_address.most_common(1)[0]
            if seats <= of_address[newcomer.host]:
                return False
            self._end(next(stranger for stranger in strangers if stranger.host == greedy))
        return True

    def _strangers(self) -> list[_Connection]:
        """The oldest first."""
        with self._lock:
            return [connection for connection in self._connections.values() if not connection.node]

    def _end_old_strangers(self, now: float) -> None:
        for connection in self._strangers():
            if now - connection.since > (STRANGER_SECONDS if connection.name else SILENT_SECONDS):
                self._end(connection)

    def _wait_for_turn(self, connection: _Connection) -> None:
        """It has said something, which is not taken before gRPC may hear of it; or it has hung up."""
        try:
            says = connection.outer.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            says = b""
        if not says:
            self._end(connection)
            return
        self._selector.unregister(connection.outer)
        self._waiting.append(connection)

    def _take_turns(self, now: float) -> None:
        if now - self._begun_since > OF_LATE_SECONDS:
            self._begun, self._begun_since = Counter(), now
        self._turns = min(BEGUN_AT_ONCE, self._turns + (now - self._turns_at) * BEGUN_PER_SECOND)
        self._turns_at = now
        self._waiting = [connection for connection in self._waiting if connection.outer in self._connections]
        while self._waiting and self._turns >= 1:
            self._turns -= 1
            following = min(self._waiting, key=lambda connection: self._begun[connection.host])  # of equals the oldest
            self._waiting.remove(following)
            self._begun[following.host] += 1
            self._begin(following)

    def _begin(self, connection: _Connection) -> None:
        try:
            inner, name = self._dial()
        except OSError:  # gRPC does not keep up, or ends
            self._end(connection)
            return
        there, back = _Half(connection.outer, inner), _Half(inner, connection.outer)
        connection.halves, connection.name = (there, back), name
        with self._lock:
            self._by_name[name] = connection
        self._selector.register(connection.outer, selectors.EVENT_READ, self._moves(connection, back, there))
        self._selector.register(inner, selectors.EVENT_READ, self._moves(connection, there, back))
        self._move(connection, there)

    def _dial(self) -> tuple[socket.socket, str]:
        """A connection to gRPC, and what gRPC calls it."""
        if sys.platform == "win32":
            place = Address.parse(self._inner)
            inner = socket.create_connection((place.host, place.port), timeout=1.0)
            inner.setblocking(False)
            return inner, f"ipv4:127.0.0.1:{inner.getsockname()[1]}"
        inner = socket.socket(socket.AF_UNIX)
        own = self._folder / str(next(self._numbers))
        try:
            inner.setblocking(False)
            inner.bind(str(own))
            inner.connect(self._inner)
        except OSError:
            inner.close()
            raise
        finally:
            own.unlink(missing_ok=True)  # the name stays with the socket
        return inner, f"unix:{own}"

    def _moves(self, connection: _Connection, to: _Half, of: _Half) -> Callable[[int], None]:
        """What to do when a socket, the target of `to` and the source of `of`, can be used."""

        def move(events: int) -> None:
            if events & selectors.EVENT_WRITE:
                self._move(connection, to)
            if events & selectors.EVENT_READ and connection.outer in self._connections:
                self._move(connection, of)

        return move

    def _move(self, connection: _Connection, half: _Half) -> None:
        """Hand on what waits, then what has come; whichever side fails ends both."""
        try:
            if half.waiting:
                half.waiting = half.waiting[half.target.send(half.waiting) :]
            if not half.waiting and not half.ended:
                self._read(half)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._end(connection)
            return
        if all(half.ended and not half.waiting for half in connection.halves):
            self._end(connection)
            return
        self._watch(connection)

    def _read(self, half: _Half) -> None:
        num_bytes = half.source.recv_into(self._block)
        if not num_bytes:
            half.ended = True
            with suppress(OSError):
                half.target.shutdown(socket.SHUT_WR)
            return
        try:
            sent = half.target.send(self._block[:num_bytes])
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < num_bytes:
            half.waiting = memoryview(bytes(self._block[sent:num_bytes]))

    def _watch(self, connection: _Connection) -> None:
        """Read from a source whose target takes more; write to a target for which something waits."""
        there, back = connection.halves
        for of, to in ((there, back), (back, there)):
            wanted = selectors.EVENT_READ if not of.waiting and not of.ended else 0
            wanted |= selectors.EVENT_WRITE if to.waiting else 0
            self._set_events(of.source, wanted, self._moves(connection, to, of))

    def _set_events(self, sock: socket.socket, wanted: int, act: Callable[[int], None]) -> None:
        """epoll tells of a socket that is closed on the other side whatever is wanted: then it must not be there."""
        key = self._selector.get_map().get(sock)
        if key is None and wanted:
            self._selector.register(sock, wanted, act)
        elif key is not None and not wanted:
            self._selector.unregister(sock)
        elif key is not None and key.events != wanted:
            self._selector.modify(sock, wanted, key.data)

    def _end(self, connection: _Connection) -> None:
        if self._connections.pop(connection.outer, None) is None:
            return
        with self._lock:
            self._by_name.pop(connection.name, None)
        for sock in connection.sockets:
            self._forget_socket(sock)

    def _forget_socket(self, sock: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _tidy(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection)
        for sock in (*self._listeners, self._wake, self._woken):
            self._forget_socket(sock)
        self._selector.close()
        self._private.close()


def bind(address: str) -> socket.socket:
    """A listening socket at `HOST:PORT` (0: any free port).

    Raises LinkError when another program listens there, when it is not an address of this machine, or all of them.

    A port may be in use although nobody listens: by a connection of a process that was killed a moment ago, or by one
    that happened to get it as its own end. Those go away, and are waited for.
    """
    place = Address.parse(address)
    until = monotonic() + BIND_SECONDS
    while True:
        try:
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            return socket.create_server((place.host, place.port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME) or isinstance(error, socket.gaierror):
                cards = read_cards()
                raise LinkError(
                    "cannot listen on {address}: this machine has no such address",
                    address=address,
                    hint="name one that it has with --listen ({addresses}), or leave --listen out",
                    addresses=", ".join([*near(cards), *near(cards, version=6)]) or Message("none"),
                ) from None
            if error.errno != errno.EADDRINUSE or _somebody_listens(place.host, place.port):
                raise LinkError(
                    "cannot listen on {address}: {reason}",
                    address=address,
                    reason=os.strerror(error.errno or 0),
                    hint="another program has that port; choose one with --listen",
                ) from None
            if monotonic() > until:
                raise LinkError(
                    "cannot listen on {address}: the port stays in use although nobody listens there",
                    address=address,
                    hint="choose another with --listen, or try again in a minute",
                ) from None
            sleep(BIND_PAUSE_SECONDS)


def _somebody_listens(host: str, port: int) -> bool:
    """Whether a program takes connections there; one may also reach oneself, when both ends get the same port."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as probe:
            return bool(probe.getsockname() != probe.getpeername())
    except OSError:
        return False


def _tune(sock: socket.socket) -> None:
    """As gRPC has its own sockets; and a connection whose other end is gone is noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_SECONDS)


def _reset(sock: socket.socket) -> None:
    """Close without a trace: a stranger's connection must not linger in the kernel."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def _short_folder() -> Path:
    """Where to make a folder whose sockets have names that are short enough."""
    usual = tempfile.gettempdir()
    return Path(usual if sys.platform == "win32" or len(usual) <= LONGEST_PATH - 40 else "/tmp")
