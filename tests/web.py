"""A web server on the loopback that misbehaves as a test wants: each path has answers that are given one by one."""

import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CEILING_SECONDS = 60.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        self.close_connection = True
        path = self.path if self.path.startswith("http") else urlsplit(self.path).path
        self.server.seen.append((path, {name.title(): value for name, value in self.headers.items()}))
        answers = self.server.answers[path]
        if not answers:
            self.reply(404, b"no such page", kind="text/plain")
            return
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self)

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
        self.do_GET()

    def do_CONNECT(self) -> None:
        """Act as a proxy. The tunnel always leads to this server itself, over TLS, for any host."""
        self.server.seen.append((f"CONNECT {self.path}", dict(self.headers)))
        self.send_response(200)
        self.end_headers()
        assert self.server.tls is not None
        with self.server.tls.wrap_socket(self.connection, server_side=True) as wrapped:
            Handler(wrapped, self.client_address, self.server)
        self.close_connection = True

    def reply(self, status: int, body: bytes, *, kind: str = "", length: int | None = None, **headers: str) -> None:
        """`length`: the announced length, if it is not the true one; -1 announces none."""
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        if length != -1:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


Answer = Callable[[Handler], None]


class Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: defaultdict[str, list[Answer]] = defaultdict(list)
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.bodies: list[bytes] = []
        """The bodies of all POST requests."""
        self.tls = tls
        self.closing = threading.Event()
        self.reached = threading.Event()
        """Set when a `silent` answer has sent its part."""

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def on(self, path: str, *answers: Answer) -> str:
        """Give these answers at `path`, one per request, the last one for ever. Returns the URL."""
        self.answers[path] = list(answers)
        return self.url(path)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignored, because a client that hangs up is no error of the server."""


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(tls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def whole(body: bytes, *, after: int | None = None) -> Answer:
    """Announce and send the whole body. `after`: hang up after this byte."""
    return fixed(200, body[:after], length=len(body))


def fixed(status: int, body: bytes = b"", **options: Any) -> Answer:
    """The same answer to every request."""
    return lambda handler: handler.reply(status, body, **options)


def chunked(body: bytes, *, is_cut: bool = False) -> Answer:
    """Send the body in chunks, without announcing a length. `is_cut`: hang up without the last chunk."""

    def answer(handler: Handler) -> None:
        handler.reply(200, b"", length=-1, Transfer_Encoding="chunked")
        for start in range(0, len(body), 1000):
            piece = body[start : start + 1000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"" if is_cut else b"0\r\n\r\n")

    return answer


def silent(body: bytes, *, after: int) -> Answer:
    """Send up to byte `after`, set `reached`, and send nothing more until the client hangs up or the test ends."""

    def answer(handler: Handler) -> None:
        handler.reply(200, body[:after], length=len(body))
        handler.wfile.flush()
        handler.server.reached.set()
        handler.connection.settimeout(0.05)
        while not handler.server.closing.is_set():
            try:
                if not handler.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    return answer


def moved(location: str, status: int = 302) -> Answer:
    return fixed(status, b"", Location=location)
