"""How the coordinator takes calls from machines it does not trust: parsed here, ended in time.

Requests come as bytes, and each is a stream for gRPC, so that a caller is checked before anything of it is waited for:
waiting takes a thread of the pool. So who calls stands in the metadata: a token, or an invite's secret.
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import MAX_DEVICES
from cuadrilla.link.identity import CoordinatorKeys

T = TypeVar("T")
MAX_CALLS = 8 * MAX_DEVICES
"""At once, of one node: for each worker a session and the one it replaces, transfers, and some spare."""
DEVICE_KEY = "cuadrilla-device"
"""In a call's metadata: for which of its devices a node calls, if it works with several."""
TOKEN_KEY, INVITE_KEY = "cuadrilla-token", "cuadrilla-invite-bin"
"""In a call's metadata: a node's token; the secret of an invite."""
MAX_WORKERS, NUM_THREADS = 256, 2048
MAX_MESSAGE_BYTES = 16 * wire.CHUNK_BYTES
HANDSHAKE_SECONDS = 5.0
IDLE_SECONDS = 15.0
"""A connection without a call is closed then; a worker's session is a call. A client connects again when it calls."""
PING_SECONDS = 5.0  # workers ask every 10 s whether the connection lives; more often is abuse
DEAD_SECONDS = 30.0
"""A connection that is silent for so long is asked whether its other end is there, and as long for the answer."""


SERVICE = "cuadrilla.crew.Crew"


def handler(call: Any) -> Any:
    """For gRPC: bytes come in; one message goes out."""
    return grpc.stream_unary_rpc_method_handler(call, response_serializer=wire.encode)


@dataclass(frozen=True)
class RunningServer:
    """A server and the threads in which it answers."""

    server: Any
    pool: ThreadPoolExecutor
    port: int

    def stop(self, seconds: float) -> None:
        """Give calls that long to end. Threads that have nothing to do end at once, not when they are collected."""
        self.server.stop(seconds).wait(2 * seconds)
        self.pool.shutdown(wait=False, cancel_futures=True)


def start_server(address: str, *, handlers: Any, keys: CoordinatorKeys) -> RunningServer:
    """A server at HOST:PORT. Raises LinkError."""
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="crew-link")
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 16),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
        ("grpc.keepalive_time_ms", int(1000 * DEAD_SECONDS)),
        ("grpc.keepalive_timeout_ms", int(1000 * DEAD_SECONDS)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * PING_SECONDS)),
    ]
    server = grpc.server(pool, handlers=[handlers], options=options)
    credentials = grpc.ssl_server_credentials([(keys.key, keys.certificate)])
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        hint = "another program may have taken that port just now; try again"
        raise LinkError("cannot listen on {address}: {reason}", address=address, reason=error, hint=hint) from None
    server.start()
    return RunningServer(server, pool, port)


class Calls:
    """The calls of each node that are going on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: defaultdict[str, list[Any]] = defaultdict(list)

    def begin(self, node: str, context: Any) -> None:
        """Know a call for as long as it lasts; ends it if its node has too many."""
        with self._lock:
            full = len(self._calls[node]) >= MAX_CALLS
            if not full:
                self._calls[node].append(context)
        if full:
            refuse(context, "too many calls at once", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
        if not context.add_callback(lambda: self._over(node, context)):  # it has ended meanwhile
            self._over(node, context)

    def end_all_but(self, nodes: Collection[str], *, after: float) -> None:
        """End the calls of all other nodes, so many seconds from now."""
        with self._lock:
            gone = [context for node in self._calls.keys() - nodes for context in self._calls.pop(node)]
        for context in gone:
            cut_off(context, after=after)

    def _over(self, node: str, context: Any) -> None:
        with self._lock:
            if context in self._calls[node]:
                self._calls[node].remove(context)
            if not self._calls[node]:
                del self._calls[node]


def said(context: Any, key: str) -> Any:
    """What a call's metadata says; empty if nothing."""
    return dict(context.invocation_metadata()).get(key, "")


def refuse(context: Any, reason: str, *, code: Any = grpc.StatusCode.PERMISSION_DENIED) -> NoReturn:
    context.abort(code, reason)
    raise AssertionError("abort raises")


def first(requests: Iterator[bytes], kind: type[T], context: Any) -> T:
    """The first message of a call; ends a call that begins with none of this kind."""
    raw = next(requests, b"")
    try:
        message: T = wire.decode(raw, kind)
    except LinkError as error:
        refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
    return message


def cut_off(context: Any, *, after: float) -> None:
    """End a call that is not over by then."""
    timer = threading.Timer(after, context.cancel)
    timer.daemon = True
    if context.add_callback(timer.cancel):
        timer.start()
