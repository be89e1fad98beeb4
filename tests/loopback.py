"""An application in this process on a free port of the loopback, and a client for it and for other services."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

import uvicorn

from cuadrilla.serve.edge import Edge
from tests.commands import wait_for


def ask(
    url: str, *, headers: Mapping[str, str], body: Any = None, method: str | None = None
) -> tuple[int, bytes, Mapping[str, str]]:
    """Status, body and headers of an answer. A body is sent as JSON, and posted unless a method is given."""
    data = None if body is None else json.dumps(body).encode()
    given = {**headers, **({} if body is None else {"Content-Type": "application/json"})}
    request = urllib.request.Request(url, headers=given, data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


@contextmanager
def listening(edge: Edge, *, around: AbstractAsyncContextManager[Any] | None = None) -> Iterator[str]:
    """Serve an application, and yield its URL. The product's `listen` works only in the main thread of a process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(edge, log_config=None, ws="none", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)

        async def work() -> None:
            async with around or nullcontext():
                await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(work()), name="service")
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
