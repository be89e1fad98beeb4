"""A port when things go wrong: a start that fails, a mistake of ours, strangers, no free seat, an end that waits."""

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cuadrilla.errors import ConfigError
from cuadrilla.link.address import Address
from cuadrilla.serve import faults
from cuadrilla.serve import listen as module
from cuadrilla.serve.edge import Edge, Limits
from cuadrilla.serve.faults import Faults, where
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
        app = Edge(app, key="", hosts=port.hosts(), limits=Limits(body_bytes=1000))
        listen(app, port=port, listener=listener, draining=lambda: None, ready=thread.start, **options)
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


def head(port: int, first: str = "GET /wait", *lines: str) -> bytes:
    return "\r\n".join([f"{first} HTTP/1.1", f"Host: 127.0.0.1:{port}", *lines, "", ""]).encode()


def asked(port: int, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    with closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("no memory is left"), ConfigError("it is unusable", hint="no")])
def test_a_start_that_fails_says_why(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        raise failure
        yield

    caplog.set_level(logging.INFO, "cuadrilla.serve")
    with pytest.raises(type(failure), match=str(failure)):
        while_listening(Starlette(lifespan=lifespan), asked)  # type: ignore[arg-type]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [failure]


def test_an_end_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        raise RuntimeError("the end")

    assert while_listening(Starlette(lifespan=lifespan), lambda port: asked(port, "/")) == 404
    (record,) = [record for record in caplog.records if record.exc_info]
    assert (record.name, str(record.exc_info and record.exc_info[1])) == ("cuadrilla.serve.listen", "the end")


@pytest.mark.parametrize("text", [None, "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_files_that_make_no_https(tmp_path: Path, text: str | None) -> None:
    certificate = tmp_path / "certificate.pem"
    if text is not None:
        certificate.write_text(text)
    port = Port(address=Address("127.0.0.1", 0), certificate=certificate, private_key=certificate)
    with pytest.raises(ConfigError, match="https is not possible") as raised:
        port.check(key="", command="cuadrilla serve")
    assert "PEM" in raised.value.hint


# -- mistakes of ours, and of strangers --------------------------------------------------------------------------------


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


def test_a_mistake_of_ours_is_in_the_log_once_and_without_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    def client(port: int) -> list[bytes]:
        found = []
        for path in ("/stream", "/before") * 10:
            with connected(port, head(port, f"GET {path}")) as connection:
                found.append(rest_of(connection))
        assert asked(port, "/") == 200
        return found

    found = while_listening(BROKEN, client)
    assert {(answer[9:12], answer.rpartition(b"\r\n\r\n")[2]) for answer in found[::2]} == {(b"200", b"3\r\none\r\n")}
    assert all(answer.startswith(b"HTTP/1.1 500") for answer in found[1::2])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all(name in text for name, text in zip(("in parts", "in breaks_before"), told, strict=True))
    assert "ValueError" in told[0]
    assert "KeyError" in told[1]
    assert SECRET not in caplog.text


def test_what_strangers_send_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Broken bodies among it, before an answer and in the middle of one."""
    secret = SECRET.encode()

    def client(port: int) -> list[bytes]:
        chunked = head(port, "POST /", JSON_TYPE, "Transfer-Encoding: chunked", f"X-{SECRET}: a")
        upgrade = head(port, "GET /", "Connection: upgrade, close", f"Upgrade: {SECRET}")
        long = chunked + b"3e9\r\n" + b" " * 1001 + b"\r\n"  # more than a body may have: answered, and received on
        found = []
        for sent, more in (
            (secret + b"\r\n\r\n", b""),
            (b"GET / HTTP/1.1\r\n" + secret + b"\r\n\r\n", b""),
            (chunked + secret + b"\r\n\r\n", b""),
            (long, secret + b"\r\n\r\n"),
            (upgrade, b""),
            (head(port, "POST /", JSON_TYPE, "Content-Length: 100") + secret, b""),
        ):
            with connected(port, sent) as connection:
                answer = connection.recv(65_536) if more else b""
                connection.sendall(more)
                connection.shutdown(socket.SHUT_WR)
                found.append(answer + rest_of(connection))
        return found

    found = while_listening(BROKEN, client)
    assert [answer[9:12] for answer in found[:5]] == [b"400", b"400", b"400", b"413", b"200"]
    assert caplog.records == []


def test_kinds_and_places_are_told_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    heard = Faults(clock=lambda: now)

    def fail(text: str) -> BaseException:
        try:
            try:
                raise ExceptionGroup(text, [ValueError(text)])
            except ExceptionGroup as cause:
                raise RuntimeError(text) from cause
        except RuntimeError as error:
            return error

    assert [line for line in where(fail(SECRET)).splitlines() if not line.startswith(" ")] == [
        "RuntimeError",
        "ExceptionGroup",
        "ValueError",
    ]
    loop = asyncio.new_event_loop()
    for _ in range(5):
        heard.hear_loop(loop, {"message": "a callback", "exception": fail(SECRET)})
    now = faults.QUIET_SECONDS + 1
    heard.hear_loop(loop, {"message": "a callback", "exception": fail(SECRET)})
    heard.hear_loop(loop, {"message": "a callback", "exception": asyncio.CancelledError(SECRET)})
    loop.close()
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 5]
    assert SECRET not in caplog.text


# -- seats -------------------------------------------------------------------------------------------------------------


class Waiting:
    """An application whose callers wait until `go`."""

    def __init__(self) -> None:
        self.inside = 0
        self.go = threading.Event()
        self.app = Starlette(routes=[Route("/wait", self._wait)])

    async def _wait(self, _: Request) -> Response:
        self.inside += 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self.go.is_set():
                await asyncio.sleep(0.005)
        return PlainTextResponse("well")


def test_who_finds_no_seat_is_told_and_others_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(module, "MOST_TURNED_AWAY", 3)
    waiting = Waiting()

    def client(port: int) -> list[bytes]:
        sockets = [socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) for _ in range(4)]
        for connection in sockets:
            connection.sendall(head(port, "GET /wait", "Connection: close"))
        until(lambda: waiting.inside == 4)
        for size in (0, 900, 2**20):  # some send everything before they read
            caller = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
            with closing(caller):
                caller.request("POST", "/wait", b" " * size, {"Content-Type": "application/json"})
                answer = caller.getresponse()
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert json.loads(answer.read())["error"]["code"] == "overloaded"
        silent = [socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) for _ in range(8)]
        assert asked(port, "/wait") == 503
        for connection in silent:
            connection.close()
        waiting.go.set()
        return [closed(connection) for connection in sockets]

    assert all(answer.endswith(b"well") for answer in while_listening(waiting.app, client))


def closed(connection: socket.socket) -> bytes:
    with connection:
        return rest_of(connection)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_SECONDS / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not come to pass")


def begun_body(port: int) -> bytes:
    return head(port, "POST /wait", JSON_TYPE, "Content-Length: 9") + b"1"


@pytest.mark.parametrize("start", [lambda _: b"", lambda _: b"GET /wait HT", begun_body])
def test_who_is_slow_gives_way(monkeypatch: pytest.MonkeyPatch, start: Callable[[int], bytes]) -> None:
    """The one that has been silent for longest; whoever waits for an answer keeps its seat."""
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 4)
    waiting = Waiting()

    def client(port: int) -> bytes:
        with connected(port, head(port, "GET /wait", "Connection: close")) as asking:
            until(lambda: waiting.inside == 1)
            slow = [socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) for _ in range(3)]
            for connection in slow:
                connection.sendall(start(port))
            with connected(port, head(port, "GET /wait", "Connection: close")) as another:
                until(lambda: waiting.inside == 2)
                assert rest_of(slow[0]) == b""
                waiting.go.set()
                answers = rest_of(asking) + rest_of(another)
            for connection in slow:
                connection.close()
            return answers

    assert while_listening(waiting.app, client).count(b"well") == 2


# -- the end -----------------------------------------------------------------------------------------------------------


def test_calls_that_do_not_end_in_time_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `late`, in their own words; who has not even asked is told, too."""
    monkeypatch.setattr(module, "CALLS_SECONDS", 0.3)
    monkeypatch.setattr(module, "TELLING_SECONDS", 0.3)
    waiting, asking = Waiting(), list[socket.socket]()

    async def late() -> None:
        waiting.go.set()

    def client(port: int) -> None:
        asking.append(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS))
        asking[0].sendall(head(port))
        asking.append(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS))
        asking[1].sendall(begun_body(port))
        until(lambda: waiting.inside == 1)

    while_listening(waiting.app, client, late=late)
    assert closed(asking[0]).endswith(b"well")
    assert b'"code": "draining"' in closed(asking[1])
