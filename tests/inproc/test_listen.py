"""A port when things go wrong: files that make no https, a mistake of ours, strangers, an end that waits."""

import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cuadrilla.errors import ConfigError
from cuadrilla.link.address import Address
from cuadrilla.serve.edge import Edge
from cuadrilla.serve.listen import Port, listen, open_port

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs signals of POSIX")

SECRET = "sk-planted-0123456789"
JSON_TYPE = "Content-Type: application/json"
PATIENCE_SECONDS = 30.0
Result = TypeVar("Result")


def while_listening(app: Any, client: Callable[[int], Result], **options: Any) -> Result:
    """What a client in another thread finds at the port; then SIGTERM ends the listening."""
    found: Future[Result] = Future()

    def work() -> None:
        try:
            found.set_result(client(port.address.port))
        except (OSError, AssertionError) as error:
            found.set_exception(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=work)
    with closing(open_port(Port(address=Address("127.0.0.1", 0)))) as listener:
        port = Port(address=Address("127.0.0.1", 0)).bound(listener)
        listen(Edge(app, key=""), port=port, listener=listener, ending=lambda: None, ready=thread.start, **options)
    thread.join()
    return found.result()


@contextmanager
def connected(port: int, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
        connection.sendall(sent)
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until it is closed, or reset."""
    found = b""
    try:
        while part := connection.recv(65_536):
            found += part
    except ConnectionError:
        pass
    return found


def head(port: int, first: str, *lines: str) -> bytes:
    return "\r\n".join([f"{first} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close", *lines, "", ""]).encode()


def test_what_is_around_it_may_fail() -> None:
    """With everything that it says: no caller has any part in it."""

    @asynccontextmanager
    async def failing() -> AsyncIterator[None]:
        raise ConfigError("it is unusable", hint="no")
        yield

    with pytest.raises(ConfigError, match="it is unusable"):
        while_listening(BROKEN, lambda _: None, around=failing())


@pytest.mark.parametrize("text", [None, "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_files_that_make_no_https(tmp_path: Path, text: str | None) -> None:
    certificate = tmp_path / "certificate.pem"
    if text is not None:
        certificate.write_text(text)
    port = Port(address=Address("127.0.0.1", 0), certificate=certificate, private_key=certificate)
    with pytest.raises(ConfigError, match="https is not possible") as raised:
        port.check(key="", command="cuadrilla serve")
    assert "PEM" in raised.value.hint


async def breaks_in_a_stream(_: Request) -> Response:
    async def parts() -> AsyncIterator[str]:
        yield "one"
        raise ValueError(SECRET)

    return StreamingResponse(parts())


async def breaks_before(_: Request) -> Response:
    raise KeyError(SECRET)


BROKEN = Starlette(
    routes=[
        Route("/stream", breaks_in_a_stream),
        Route("/before", breaks_before),
        Route("/", lambda _: PlainTextResponse("well")),
    ]
)


def test_a_mistake_of_ours_is_in_the_log_without_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    def client(port: int) -> list[bytes]:
        found = []
        for path in ("/stream", "/before", "/"):
            with connected(port, head(port, f"GET {path}")) as connection:
                found.append(rest_of(connection))
        return found

    stream, before, well = while_listening(BROKEN, client)
    assert stream.startswith(b"HTTP/1.1 200")
    assert before.startswith(b"HTTP/1.1 500")
    assert well.endswith(b"well")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    for text, kind, place in zip(told, ("ValueError", "KeyError"), ("in parts", "in breaks_before"), strict=True):
        assert kind in text
        assert place in text
    assert SECRET not in caplog.text


def test_what_strangers_send_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Broken bodies among it."""
    secret = SECRET.encode()

    def client(port: int) -> list[bytes]:
        chunked = head(port, "POST /", JSON_TYPE, "Transfer-Encoding: chunked", f"X-{SECRET}: a")
        found = []
        for sent in (
            secret + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + secret + b"\r\n\r\n",
            chunked + secret + b"\r\n\r\n",
            head(port, "GET /", f"Upgrade: {SECRET}"),
            head(port, "POST /", JSON_TYPE, "Content-Length: 100") + secret,
        ):
            with connected(port, sent) as connection:
                connection.shutdown(socket.SHUT_WR)
                found.append(rest_of(connection))
        return found

    found = while_listening(BROKEN, client)
    assert [answer[9:12] for answer in found[:4]] == [b"400", b"400", b"400", b"200"]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
