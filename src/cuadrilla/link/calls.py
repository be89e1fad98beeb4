"""How the coordinator takes calls from machines it does not trust: parsed here, ended in time.

Requests come as bytes, and each is a stream for gRPC, so that a caller is checked before anything of it is waited for:
waiting takes a thread of the pool. So who calls stands in the metadata: a token, or an invite's secret.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import MAX_DEVICES, Busy, Clock, Refused
from cuadrilla.link.identity import CoordinatorKeys
from cuadrilla.link.nodes import NameTaken

SERVICE = "cuadrilla.crew.Crew"
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
PING_SECONDS = 5.0  # clients ask every 10 s whether the connection lives; more often is abuse
DEAD_SECONDS = 30.0
"""A connection that is silent for so long is asked whether its other end is there, and as long for the answer."""
MEASURE_SECONDS = 25.0
"""A measurement of bandwidth ends then: what arrives is counted and thrown away, what is sent is one constant chunk."""
MEASURE_CHUNK_BYTES = 2**17
"""Small enough to end in time on a slow link, large enough to fill a fast one."""


def start_server(address: str, *, handlers: Any, keys: CoordinatorKeys, pool: ThreadPoolExecutor) -> tuple[Any, int]:
    """gRPC's server at HOST:PORT, and its port; it answers in threads of `pool`. Raises LinkError."""
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
    return server, port


def said(context: Any, key: str) -> Any:
    """What a call's metadata says; empty if nothing."""
    return dict(context.invocation_metadata()).get(key, "")


@contextmanager
def refusing(context: Any) -> Iterator[None]:
    """Ends a call with what went wrong, as `client.as_link_error` reads it."""
    try:
        yield
    except CuadrillaError as error:
        match error:
            case NameTaken():
                code = grpc.StatusCode.ALREADY_EXISTS
            case Refused():
                code = grpc.StatusCode.PERMISSION_DENIED
            case Busy():
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            case _:
                code = grpc.StatusCode.INVALID_ARGUMENT
        context.abort(code, error.message)


def cut_off(context: Any, *, after: float) -> None:
    """End a call that is not over by then."""
    timer = threading.Timer(after, context.cancel)
    timer.daemon = True
    if context.add_callback(timer.cancel):
        timer.start()


def measure_arriving(requests: Iterator[bytes]) -> Clock:
    """What a node sends, to its end or for so long."""
    num_bytes, end = 0, time.monotonic() + MEASURE_SECONDS
    for chunk in requests:
        num_bytes += len(chunk)
        if time.monotonic() > end:
            break
    return Clock(unix_seconds=time.time(), num_bytes=num_bytes)


def bytes_for(seconds: float) -> Iterator[bytes]:
    """What the other side receives for so long, from the first chunk on."""
    chunk, end = os.urandom(MEASURE_CHUNK_BYTES), time.monotonic() + min(seconds, MEASURE_SECONDS)
    while time.monotonic() < end:
        yield chunk
