"""How the coordinator takes calls from machines it does not trust: parsed here, few at once, ended in time.

Messages are parsed here and not by gRPC: after one that cannot be parsed it never finds the end of the call, and waits
for it when it stops (grpcio 1.85: `_status` after `_abort`). And every request is a stream for gRPC, so that a caller
is checked before anything of it is waited for: waiting takes a thread of the pool.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.ciphers import is_only_new_tls
from cuadrilla.link.names import MAX_DEVICES, node_of
from cuadrilla.link.tls import Identity

MAX_CALLS = 8
"""At once, of one worker: a session and the one it replaces, transfers, and some spare."""
DEVICE_KEY = "cuadrilla-device"
"""In a call's metadata: for which of its devices a node calls, if it works with several."""
RUN_KEY = "cuadrilla-run"
"""In a session's metadata: what its node was told to take part in. By now there may be other work for it."""
MAX_CALLS_OF_AN_ADDRESS, MAX_CALLS_OF_STRANGERS = 4, 64
"""Of those who are not in the crew. Enrolling takes a call of less than a second."""
MAX_WORKERS = 256
DESCRIPTORS_OF_A_WORKER = 4
"""Its connection here and behind the gate, and one more of each while a newer one takes over."""
MAX_MESSAGE_BYTES = 16 * wire.CHUNK_BYTES
HANDSHAKE_SECONDS = 5.0
PING_SECONDS = 5.0  # workers ask every 10 s whether the connection lives; more often is abuse


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


def start_server(address: str, *, handlers: Any, identity: Identity, roots: bytes) -> RunningServer:
    """A server at an address as gRPC writes it; it takes callers whose certificates come from `roots`.

    Those never change: gRPC's credentials that are asked for at each handshake are used after they were freed when
    connections end at the wrong moment (grpc/grpc issue 36693; 1.85 dies after some hundred of them).
    """
    assert is_only_new_tls()
    pool = ThreadPoolExecutor(MAX_CALLS * MAX_WORKERS, thread_name_prefix="crew-link")
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 2 * MAX_CALLS),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * PING_SECONDS)),
    ]
    server = grpc.server(pool, handlers=[handlers], options=options)
    pair = (identity.key, identity.certificate)
    credentials = grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=True)
    port: int = server.add_secure_port(address, credentials)
    server.start()
    return RunningServer(server, pool, port)


class Admission:
    """Counts the calls that are going on: of each worker, each node, each address's strangers, all strangers.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()

    def admit(self, worker: str, context: Any) -> None:
        """Count a call of a worker for as long as it lasts; ends it if there are too many."""
        self._admit({worker: MAX_CALLS, f"{node_of(worker)}/": MAX_CALLS * MAX_DEVICES}, context)

    def admit_stranger(self, host: str, context: Any) -> None:
        """The same for somebody who is no node (yet)."""
        self._admit({f"@{host}": MAX_CALLS_OF_AN_ADDRESS, "@": MAX_CALLS_OF_STRANGERS}, context)

    def _admit(self, limits: Mapping[str, int], context: Any) -> None:
        with self._lock:
            full = any(self._calls[key] >= limit for key, limit in limits.items())
            if not full:
                self._calls.update(limits.keys())
        if full:
            refuse(context, "too many calls at once", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
        if not context.add_callback(lambda: self._release(limits)):  # it has ended meanwhile
            self._release(limits)

    def _release(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._calls.subtract(keys)
            self._calls = +self._calls


def reads(call: Any, kind: Any) -> Callable[[Iterator[bytes], Any], Any]:
    """A handler for gRPC whose requests arrive as bytes; `call` gets an iterator of messages of `kind`."""
    return lambda raw, context: call(_parsed(raw, kind), context)


def refuse(context: Any, reason: str, *, code: Any = grpc.StatusCode.PERMISSION_DENIED) -> NoReturn:
    context.abort(code, reason)
    raise AssertionError("abort raises")


def _parsed(raw: Iterator[bytes], kind: Any) -> Iterator[Any]:
    """Messages from their bytes. Raises LinkError for noise."""
    for item in raw:
        try:
            message = kind.FromString(item)
        except DecodeError:
            raise LinkError("a message cannot be read", hint="install the same version on both machines") from None
        yield message


def only(requests: Iterator[Any], context: Any) -> Any:
    """The one message of a call."""
    try:
        message = next(requests, None)
    except LinkError as error:
        refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
    if message is None:
        refuse(context, "a call without a message", code=grpc.StatusCode.INVALID_ARGUMENT)
    return message


def cut_off(context: Any, *, after: float) -> None:
    """End a call that is not over by then."""
    timer = threading.Timer(after, context.cancel)
    timer.daemon = True
    if context.add_callback(timer.cancel):
        timer.start()


def serialize(message: Any) -> bytes:
    raw: bytes = message.SerializeToString()
    return raw
