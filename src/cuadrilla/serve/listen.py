"""One port of a service: on which address, for whom, and how it ends.

Invariants
* An address that other machines reach needs a key, which comes from a file or a hidden prompt.
* A connection has `HEAD_SECONDS` to send the head of a request, and `READ_SECONDS` to read what was sent to it. When
  all seats are taken, the one that has owed us something for longest gives up its own, so that strangers who only
  connect, or send a body byte by byte, keep nobody out. When all wait for our answers, whoever comes is told so (503),
  and what it has sent is not read.
* Whoever leaves is noticed, although something of a next request has come already.
* SIGTERM or Ctrl-C: no new connections; requests at hand may end within `CALLS_SECONDS`, then they are ended, and the
  process ends with 0 within `DRAIN_SECONDS`.
* What fails at the start is raised, with everything that it says; what fails later is in the log (`faults.py`).
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.host.descriptors import allow_descriptors
from cuadrilla.link.address import Address
from cuadrilla.rundir import read_regular
from cuadrilla.serve.edge import OPEN_TO_ALL, Application, Refusal, raw_answer, raw_refusal
from cuadrilla.serve.faults import Faults, Kept, told_by_us

HEAD_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 30
READ_SECONDS = 30.0
HANDSHAKE_SECONDS = 5.0
"""Of TLS: until then a connection has no seat, but a file of the process."""
DRAIN_SECONDS = 10.0
"""From the signal until the process is gone."""
CALLS_SECONDS, TELLING_SECONDS = 8.0, 0.7
"""Of these, what calls at hand may take, and then for telling those who have not ended. The rest is for the step of
generation at hand and what a task of one's own is doing, on a machine that may have other things to do."""
MOST_CONNECTIONS = 512
MOST_TURNED_AWAY = 512
"""Who are told that all seats are taken, and still read it."""
LINGER_SECONDS, MOST_THROWN_AWAY_BYTES = 2.0, 2 * 2**20
"""Of them: until then they may send on, since some read an answer only when they have sent everything."""
ENDING = Refusal(503, "the service is ending", code="draining", wait_seconds=1)
TURNED_AWAY = Refusal(503, "all connections of this service are taken", code="overloaded", wait_seconds=1)
ASKS_WHETHER_ALIVE = f"GET {OPEN_TO_ALL} ".encode()
ALIVE = raw_answer(200, {"status": "ok"})
"""Also then: who restarts what is not alive must not restart what has much to do."""
MOST_HEAD_BYTES = 16_384
LEAST_KEY, MOST_KEY = 16, 512
BACKLOG = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Port:
    """Where a service listens; `certificate` and `private_key`: PEM files, for https."""

    address: Address
    certificate: Path | None = None
    private_key: Path | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{self.address}"

    def hosts(self, *others: str) -> list[str]:
        """By which names a caller may address it, `others` included."""
        port = self.address.port
        own = [str(self.address)]
        if self.address.is_loopback:
            own += [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]
        standard = 443 if self.certificate else 80
        return [*own, *(host.rpartition(":")[0] for host in own if port == standard), *others]

    def bound(self, listener: socket.socket) -> "Port":
        """With the number that the system has given where any free one was asked for."""
        return replace(self, address=Address(self.address.host, listener.getsockname()[1]))

    def check(self, *, key: str, command: str) -> None:
        """Raises LinkError where anybody could call, ConfigError for files that make no https."""
        if not key and not self.address.is_loopback:
            raise LinkError(
                "{address} can be reached by others, and the service has no key",
                address=self.address,
                hint="write one to a file, readable by you only: {command} --listen {address} --key-file FILE",
                command=command,
            )
        if self.certificate is not None:
            self._check_certificate(self.certificate)

    def _check_certificate(self, certificate: Path) -> None:
        try:
            # A key with a password would be asked for at the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, self.private_key, password=str)
        except OSError as error:
            raise ConfigError(
                "https is not possible with {certificate} and {private_key}: {reason}",
                certificate=certificate,
                private_key=self.private_key,
                reason=error.strerror or str(error),
                hint="name two PEM files: a certificate, and its own key without a password",
            ) from error


def read_key(path: Path) -> str:
    """The first line of a file. Raises ConfigError for one that is no secret."""
    try:
        lines = read_regular(path, most_bytes=64 * 1024).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError("{path}: {reason}", path=path, reason=reason, hint="name a file that holds the key") from None
    return check_key(lines[0].strip() if lines else "", where=str(path))


def check_key(key: str, *, where: str) -> str:
    """Raises ConfigError for a key that a header cannot carry, or that is easily guessed."""
    if not LEAST_KEY <= len(key) <= MOST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "{where}: a key has {least} to {most} letters, digits and signs of ASCII, and no space",
            where=where,
            least=LEAST_KEY,
            most=MOST_KEY,
            hint="make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE",
        )
    return key


def open_port(port: Port) -> socket.socket:
    """Raises LinkError where it is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in port.address.host else socket.AF_INET
    # Named: asyncio sets TCP_NODELAY only where it is, and each answer would wait 40 ms for the caller's delayed ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((port.address.host, port.address.port))
        listener.listen(BACKLOG)  # two that are only bound may have the same port
    except OSError as error:
        listener.close()
        raise LinkError(
            "cannot listen on {address}: {reason}",
            address=port.address,
            reason=error.strerror or str(error),
            hint="choose another port, or an address of this machine: --listen 127.0.0.1:{next}",
            next=port.address.port + 1,
        ) from error
    return listener


def listen(
    app: Application,
    *,
    port: Port,
    listener: socket.socket,
    draining: Callable[[], None],
    ready: Callable[[], None] = lambda: None,
    late: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Answer calls, from `ready` on, until a signal comes; `draining` hears of it first. Call it in the main thread.

    `late`: ends the calls that are still at hand after `CALLS_SECONDS`; without it their connections are closed.
    Raises whatever the application's start raises.
    """
    allow_descriptors(16 * MOST_CONNECTIONS)
    kept, faults = Kept(app), Faults()
    server = _Server(_config(kept, port), ready=ready, draining=draining, late=late, faults=faults)
    with told_by_us(faults):
        try:
            server.run(sockets=[listener])
        except SystemExit:  # how uvicorn gives up at the start
            assert kept.failure is not None
            log.info("how it failed:", exc_info=kept.failure)
            raise kept.failure from None
    if kept.failure is not None:
        log.error("the service has not ended as it should", exc_info=kept.failure)


def _config(app: Application, port: Port) -> uvicorn.Config:
    return uvicorn.Config(
        cast(Any, app),
        http=_Connection,
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=BACKLOG,
        ssl_certfile=port.certificate,
        ssl_keyfile=port.private_key,
    )


class _Server(uvicorn.Server):
    """Ends with 0 after a signal, where uvicorn's own sends itself the signal again."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        ready: Callable[[], None],
        draining: Callable[[], None],
        late: Callable[[], Awaitable[None]] | None,
        faults: Faults,
    ) -> None:
        super().__init__(config)
        self._ready, self._draining, self._late, self._faults = ready, draining, late, faults
        self._asked_at = 0.0
        """To end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._faults.hear_loop)
        if self.config.is_ssl:  # uvicorn leaves asyncio's 60 seconds
            made = partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_SECONDS)
            loop.create_server = made  # type: ignore[method-assign]
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._asked_at = self._asked_at or time.monotonic()
        self._draining()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        left = CALLS_SECONDS - (time.monotonic() - self._asked_at)
        self.config.timeout_graceful_shutdown = cast(int, left + TELLING_SECONDS)
        ending = asyncio.create_task(self._end_late(left))
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late(self, seconds: float) -> None:
        """What is then still at hand is cancelled by uvicorn, which would answer 500."""
        await asyncio.sleep(seconds)
        telling = asyncio.ensure_future(self._late()) if self._late is not None else None
        await asyncio.sleep(0.8 * TELLING_SECONDS)
        for connection in cast("set[_Connection]", self.server_state.connections.copy()):
            connection.end_unanswered()
        if telling is not None:
            await telling


class _Connection(H11Protocol):
    """Of one caller."""

    _waiting: TimerHandle | None = None
    _unread: TimerHandle | None = None
    _silent_since = 0.0
    _has_seat = True
    _thrown_away_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent_since = self.loop.time()
        self._await_head()
        if len(self.connections) > MOST_CONNECTIONS:
            self._find_seat()

    def _find_seat(self) -> None:
        others = [
            other
            for other in cast("set[_Connection]", self.connections)
            if other is not self and not other.transport.is_closing()
        ]
        seated = [other for other in others if other._has_seat]
        if len(seated) < MOST_CONNECTIONS:
            return
        silent = [other for other in seated if other.is_silent or other.conn.their_state is h11.SEND_BODY]
        self._has_seat = bool(silent)
        standing = [other for other in others if not other._has_seat]
        if silent or len(standing) >= MOST_TURNED_AWAY:
            min(silent or standing, key=lambda other: other._silent_since).transport.abort()

    def _turn_away(self, data: bytes) -> None:
        """What it sends is not read: the answer is the same whatever it asks, but whether we are alive."""
        if not self._thrown_away_bytes:
            self._stop_waiting()
            self.transport.write(ALIVE if data.startswith(ASKS_WHETHER_ALIVE) else raw_refusal(TURNED_AWAY))
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._waiting = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        self._thrown_away_bytes += len(data)
        if self._thrown_away_bytes > MOST_THROWN_AWAY_BYTES:
            self.flow.pause_reading()

    def end_unanswered(self) -> None:
        if self.cycle is not None and not self.cycle.response_started:
            self.transport.write(raw_refusal(ENDING))
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._has_seat:
            self._turn_away(data)
            return
        was_silent = self.is_silent
        if not self.flow.write_paused:
            self._stop_reader()
        super().data_received(data)
        if not self.is_silent:
            self._stop_waiting()
        elif was_silent and self._waiting is None:
            self._await_head()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= MOST_HEAD_BYTES:
            self.flow.resume_reading()  # else nobody would see it leave

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP. In the middle of an answer, which a broken body can be, there is no place for one."""
        if self.cycle is None or self.cycle.response_complete:
            super().send_400_response(msg)
            return
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self.cycle.response_started:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._silent_since = self.loop.time()
        self._await_reader()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_reader()
        super().connection_lost(exc)

    @property
    def is_silent(self) -> bool:
        """Nothing is asked of us: it has just connected, or has its answer, or has sent a part of a head."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    def _await_head(self) -> None:
        """From the first byte of a request on."""
        loop: AbstractEventLoop = self.loop
        self._waiting = loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _await_reader(self) -> None:
        """Closing would wait for it."""
        if self._unread is None and self.transport.get_write_buffer_size():
            self._unread = self.loop.call_later(READ_SECONDS, self._let_go)

    def _stop_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _let_go(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()
