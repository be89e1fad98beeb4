"""One port of a service: on which address, for whom, and how it ends.

Invariants
* An address that other machines reach needs a key, which comes from a file or a hidden prompt.
* A connection has `HEAD_SECONDS` to send the head of a request, and `READ_SECONDS` to read what was sent to it. When
  all seats are taken, the one that has owed us something for longest gives up its own, so that strangers who only
  connect, or send a body byte by byte, keep nobody out.
* Whoever leaves is noticed, although something of a next request has come already.
* SIGTERM or Ctrl-C: no new connections; requests at hand may end within `DRAIN_SECONDS`, then the process ends with 0.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterator
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
from cuadrilla.serve.edge import Application

HEAD_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 30
READ_SECONDS = 30.0
HANDSHAKE_SECONDS = 5.0
"""Of TLS: until then a connection has no seat, but a file of the process."""
DRAIN_SECONDS = 10
MOST_CONNECTIONS = 512
MOST_HEAD_BYTES = 16_384
LEAST_KEY, MOST_KEY = 16, 512
BACKLOG = 1024


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
        """Raises LinkError where anybody could call."""
        if not key and not self.address.is_loopback:
            raise LinkError(
                "{address} can be reached by others, and the service has no key",
                address=self.address,
                hint="write one to a file, readable by you only: {command} --listen {address} --key-file FILE",
                command=command,
            )


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
) -> None:
    """Answer calls, from `ready` on, until a signal comes; `draining` hears of it first. Call it in the main thread."""
    allow_descriptors(16 * MOST_CONNECTIONS)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it repeats what strangers send
    config = uvicorn.Config(
        cast(Any, app),
        http=_Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        backlog=BACKLOG,
        ssl_certfile=port.certificate,
        ssl_keyfile=port.private_key,
    )
    _Server(config, ready=ready, draining=draining).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends with 0 after a signal, where uvicorn's own sends itself the signal again."""

    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], draining: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._draining = ready, draining

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
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
        self._draining()
        super().handle_exit(sig, frame)


class _Connection(H11Protocol):
    """Of one caller."""

    _waiting: TimerHandle | None = None
    _unread: TimerHandle | None = None
    _silent_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent_since = self.loop.time()
        self._await_head()
        others = cast("set[_Connection]", self.connections)
        if len(others) > MOST_CONNECTIONS:
            silent = [other for other in others if other.is_silent or other.conn.their_state is h11.SEND_BODY]
            min(silent or [self], key=lambda other: other._silent_since).transport.abort()

    def data_received(self, data: bytes) -> None:
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
