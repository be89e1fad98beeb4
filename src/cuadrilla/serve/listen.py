"""One port of a service: on which address, for whom, and how it ends. uvicorn answers.

Invariants
* An address that other machines reach needs a key, which comes from a file or a hidden prompt.
* A caller who reads nothing for `READ_SECONDS` is let go, where the system can do it (Linux).
* SIGTERM or Ctrl-C: no new connections; requests at hand may end within `CALLS_SECONDS`, then they are ended.
* Of an error in a call the log has its kind and the places in the code, not what it says: a caller's text may be in it.
"""

import asyncio
import logging
import signal
import socket
import ssl
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.host.descriptors import allow_descriptors
from cuadrilla.link.address import Address
from cuadrilla.serve.edge import Application

KEEP_ALIVE_SECONDS = 30
READ_SECONDS = 30
CALLS_SECONDS = 8
"""From the signal on."""
MAX_HEAD_BYTES = 16_384
MAX_FILES = 16_384
"""Open at once, connections among them: strangers who only connect do no harm until there are so many."""
MIN_KEY, MAX_KEY = 16, 512
BACKLOG = 1024
LIBRARIES = ("uvicorn.error", "asyncio")
"""The loggers that tell of errors in calls."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """Where a service listens; `certificate` and `private_key`: PEM files, for https."""

    address: Address
    certificate: Path | None = None
    private_key: Path | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{self.address}"

    def bound(self, listener: socket.socket) -> "Port":
        """With the number that the system has given where any free one was asked for."""
        return replace(self, address=Address(self.address.host, listener.getsockname()[1]))

    def check(self, *, key: str, command: str) -> None:
        """Raises LinkError where anybody could call, ConfigError for files that make no https."""
        if not key and not self.address.is_loopback:
            raise LinkError(
                "{address} can be reached by others, and the service has no key",
                address=self.address,
                hint="write one to a file, readable by you only: {command} --host {host} --api-key-file FILE",
                host=self.address.host,
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
        with open(path, encoding="utf-8") as file:
            line = file.readline(MAX_KEY + 2)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError("{path}: {reason}", path=path, reason=reason, hint="name a file that holds the key") from None
    return check_key(line.strip(), where=str(path))


def check_key(key: str, *, where: str) -> str:
    """Raises ConfigError for a key that a header cannot carry, or that is easily guessed."""
    if not MIN_KEY <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "{where}: a key has {least} to {most} letters, digits and signs of ASCII, and no space",
            where=where,
            least=MIN_KEY,
            most=MAX_KEY,
            hint="make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE",
        )
    return key


def open_port(port: Port) -> socket.socket:
    """Raises LinkError where it is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in port.address.host else socket.AF_INET
    # Named: asyncio sets TCP_NODELAY only where it is, and each answer would wait 40 ms for the caller's delayed ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, READ_SECONDS * 1000)
    try:
        listener.bind((port.address.host, port.address.port))
        listener.listen(BACKLOG)  # two that are only bound may have the same port
    except OSError as error:
        listener.close()
        raise LinkError(
            "cannot listen on {address}: {reason}",
            address=port.address,
            reason=error.strerror or str(error),
            hint="choose another port, or an address of this machine: --port {next}",
            next=port.address.port + 1,
        ) from error
    return listener


def listen(
    app: Application,
    *,
    port: Port,
    listener: socket.socket,
    ending: Callable[[], object],
    ready: Callable[[], None] = lambda: None,
    around: AbstractAsyncContextManager[Any] | None = None,
) -> None:
    """Answer calls within `around`, from `ready` on, until a signal comes; `ending` is called then, in the event loop.

    Call it in the main thread. Raises what `around` raises.
    """
    allow_descriptors(MAX_FILES)
    for name in LIBRARIES:
        logging.getLogger(name).addFilter(without_texts)
    server = _Server(_config(app, port), ending=ending)

    async def answer() -> None:
        async with around or nullcontext():
            ready()
            await server.serve(sockets=[listener])

    asyncio.run(answer())


def _config(app: Application, port: Port) -> uvicorn.Config:
    return uvicorn.Config(
        cast(Any, app),
        http=_Protocol,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CALLS_SECONDS + 1,
        backlog=BACKLOG,
        ssl_certfile=port.certificate,
        ssl_keyfile=port.private_key,
    )


class _Protocol(H11Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(Any, _OneWrite(transport)))


class _OneWrite:
    """A connection on which an answer's head waits for its first piece, and leaves in one write with it. uvicorn writes
    them apart: of a service that is killed between, a proxy would have a head, and could ask no other service."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._head = transport, b""

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 200 "):
            self._head = data
            return
        whole, self._head = self._head + data, b""
        self._transport.write(whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Server(uvicorn.Server):
    """Ends with 0 after a signal, where uvicorn's own sends itself the signal again."""

    def __init__(self, config: uvicorn.Config, *, ending: Callable[[], object]) -> None:
        super().__init__(config)
        self._ending = ending

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await super().shutdown(sockets)


def without_texts(record: logging.LogRecord) -> bool:
    """A filter for what a library logs: errors only, each with its place in place of what it says."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = "the service has made a mistake: %s", (where(record.exc_info[1]),)
        record.exc_info = None
    return record.levelno >= logging.ERROR


def where(error: BaseException) -> str:
    """The kind of an error and the places in the code, without what it says."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()
