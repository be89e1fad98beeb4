"""One port of a service, answered by uvicorn. An address that other machines reach needs a key.

After SIGTERM or Ctrl-C no new connections are accepted. Running requests may finish within `CALLS_SECONDS`.
"""

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.host.process import allow_descriptors
from cuadrilla.link.address import Address

KEEP_ALIVE_SECONDS = 30
CALLS_SECONDS = 8
"""Time that running requests have after the signal."""
MAX_FILES = 16_384
"""Files that may be open at once, including connections. Fewer strangers who only connect do no harm."""
MIN_KEY = 16
BACKLOG = 1024


def read_key(path: Path) -> str:
    """The key in a file. Raises ConfigError if a header cannot carry it, or if it is short and easily guessed."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError("{path}: {reason}", path=path, reason=reason, hint="name a file that holds the key") from None
    if len(key) < MIN_KEY or not key.isprintable():
        hint = "make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE"
        raise ConfigError(
            "{path}: a key is one line of at least {least} printable characters", path=path, least=MIN_KEY, hint=hint
        )
    return key


def open_port(address: Address) -> socket.socket:
    """Listen on an address. Raises LinkError if it is taken, or is not an address of this machine."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise LinkError(
            "cannot listen on {address}: {reason}",
            address=address,
            reason=(error.strerror or str(error)).partition(" (")[0],  # Python adds the address
            hint="choose another port, or an address of this machine: --port {next}",
            next=address.port + 1,
        ) from error
    # Connections inherit this; asyncio sets it only for its own sockets. Without it answers wait 40 ms for ACKs.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://{Address(host, port)}"


def listen(
    app: ASGIApp,
    *,
    listener: socket.socket,
    around: AbstractAsyncContextManager[object],
    ready: Callable[[], None],
    ending: Callable[[], object],
) -> None:
    """Enter `around`, call `ready`, and answer calls until a signal comes. Then call `ending`, in the event loop.

    Call it in the main thread. Raises what `around` raises.
    """
    allow_descriptors(MAX_FILES)
    config = uvicorn.Config(
        cast(Any, app),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CALLS_SECONDS + 1,
    )

    async def answer() -> None:
        async with around:
            ready()
            await _Server(config, ending=ending).serve(sockets=[listener])

    asyncio.run(answer())


class _Server(uvicorn.Server):
    """Ends with exit code 0 after a signal. uvicorn's own server would send itself the signal again."""

    def __init__(self, config: uvicorn.Config, *, ending: Callable[[], object]) -> None:
        super().__init__(config)
        self._ending = ending

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await super().shutdown(sockets)
