"""The coordinator's side of the crew link: gRPC over TLS on one port, which workers dial.

`CrewServer.send` sends a message to a worker. Messages from workers go to `receive`. Each worker has a thread, which
handles its messages in their order.

There are two calls. `Session` carries a worker's messages both ways and its contributions, as long as it works. `Call`
carries everything else: a message or a file, answered by a message or by bytes. The token is in the call's metadata, so
the caller is checked before the server waits for any data from it.

Invariants
* Every call is authenticated by the token in its metadata and the list of nodes. Only `Enroll` needs the secret of an
  open invite instead.
* A node has one worker, or one for each device that its calls name. Its token is valid for all of them.
* A worker has one session. A new one ends the old one, whose late messages no longer count. A kick ends all sessions.
* For a peer the server allocates only the tensors that its run expects, for one contribution at a time.
* A connection that ends without a Goodbye is a worker that left. The coordinator's clock detects silent ones.
"""

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from cuadrilla.errors import CuadrillaError, LinkError, ResourceError
from cuadrilla.home import Home
from cuadrilla.host.process import allow_descriptors
from cuadrilla.link import wire
from cuadrilla.link.address import Address, check_free
from cuadrilla.link.base import (
    KICKED,
    NOT_LISTED,
    Check,
    Contribution,
    Describe,
    Download,
    Enroll,
    Enrolled,
    Follow,
    Goodbye,
    Hello,
    Leave,
    NodeReport,
    Offer,
    Progress,
    Refused,
    RunDescription,
    Stop,
    ToWorker,
    Version,
    node_of,
    offered,
)
from cuadrilla.link.identity import Identity, open_coordinator
from cuadrilla.link.invite import Invites
from cuadrilla.link.jobs import CheckpointFile, JobNews, JobReceiver, Order
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.standby import StandbyServer
from cuadrilla.log import NOTE
from cuadrilla.messages import Message
from cuadrilla.version import __version__

DESCRIPTORS = 16_384
"""Limit of open files of this process. With 1,024, 1,500 connections that send nothing would block the server."""
NUM_THREADS, MAX_DEVICE_NAME = 2048, 20
IDLE_SECONDS = 15.0
"""A connection without a call is closed after this time. A session is a call; a client reconnects for its next call."""
STOP_SECONDS = 5.0
KEPT_VERSIONS = 2
"""Versions that can be downloaded: a worker may still be reading the one before the newest."""
NOTHING = Offer(config="", files={})
KEPT_UPLOADS = 4
"""Buffers for contributions that are reused in the next round. More workers than this need fresh memory."""
DISCONNECTED, KICK = Message("the connection ended"), Message("it was kicked")

FROM_WORKER = (Hello, Progress, Goodbye, NodeReport)
"""The messages of a worker in its session: these, and `Contribution` or `JobNews`."""
ASKED = (Describe, Leave, Download, Check, Follow, CheckpointFile)
"""The messages that begin a `Call` of a node with a token."""

log = logging.getLogger(__name__)


Receive = Callable[[str, Any], None]
"""Takes each worker's messages, and a Goodbye for a worker whose connection ended without one. It is called from the
link's threads, so it must return at once and raise nothing. No lock of the link is held then."""


@dataclass(eq=False)
class _Session:
    worker: str
    outbox: "queue.SimpleQueue[ToWorker | Order | None]" = field(default_factory=queue.SimpleQueue)
    progress: Progress = field(default_factory=lambda: Progress(micro_steps=0))
    chunks: int = 0
    """Chunks of data that have arrived. Each counts as progress."""


class CrewServer:
    """Serves one run, or with `jobs` machines that train whole runs. `home`: the crew's keys, nodes, invites and term;
    `contributions`: the layouts that a contribution may have; `standbys`: nodes that may copy the keys and `run`, the
    run directory. Raises LinkError.
    """

    def __init__(
        self,
        home: Home,
        *,
        receive: Receive,
        offer: Offer = NOTHING,
        contributions: Sequence[wire.Layout] = (),
        standbys: frozenset[str] = frozenset(),
        run: Path = Path(),
        jobs: JobReceiver | None = None,
    ) -> None:
        self.keys, self.nodes, self.invites = open_coordinator(home.crew), AllowList(home.nodes), Invites(home.invites)
        self._receive = receive
        self._description = RunDescription(
            config=offer.config,
            files=offered(offer.files),
            cuadrilla=__version__,
            term=home.term,
            takes_jobs=jobs is not None,
        )
        self._offer, self._contributions = offer, contributions
        self._versions: dict[int, memoryview] = {}
        self._version_memory, self._upload_memory = wire.Memory(keep=1), wire.Memory(keep=KEPT_UPLOADS)
        self._standby = StandbyServer(names=standbys, crew=home.crew, run=run, members=set(self.nodes.nodes()))
        self._jobs = jobs
        self._kinds = (*FROM_WORKER, Contribution if jobs is None else JobNews)
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        """The open session of each worker. Messages of a session that is not in here are dropped."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="crew-link")
        self._servers: list[Any] = []

    # -- for the engine ------------------------------------------------------------------------------------------------

    def open(self, listen: Address) -> None:
        """Listen for other machines, which dial `self.address` from now on. Raises LinkError."""
        self.address = str(Address(listen.host, self.serve(str(listen))))

    def open_here(self) -> str:
        """The address for workers on this machine: a loopback one, which works without a network. Raises LinkError."""
        at = Address.parse(self.address)
        if not at.is_loopback:
            at = Address("127.0.0.1", at.port)
            self.serve(str(at))
        return str(at)

    def serve(self, address: str) -> int:
        """Listen also at HOST:PORT (0: any free port). Returns the port. Raises LinkError."""
        allow_descriptors(DESCRIPTORS)
        check_free(address)
        calls = {"Session": self._session, "Call": self._call}
        server, port = start_server(address, calls, keys=self.keys, pool=self._pool)
        self._servers.append(server)
        return port

    def send(self, worker: str, message: ToWorker | Order) -> None:
        """Send a message without waiting. It is dropped if the worker has no session.

        A `Version`'s parameters are copied now, since the weights of record may change before the worker reads them.
        """
        if isinstance(message, Version):
            self._publish(message)
            standbys = tuple(sorted(self._standby.addresses.values()))
            message = replace(message, standbys=standbys)
        session = self._sessions.get(worker)
        if session is not None and isinstance(message, Stop):
            self._end(session, message)
        elif session is not None:
            session.outbox.put(message)

    def _publish(self, version: Version) -> None:
        """Keep a copy of the version's parameters, one for all workers."""
        if version.version not in self._versions:
            assert isinstance(version.parameters, Mapping)
            if len(self._versions) >= KEPT_VERSIONS:  # first, so that its memory is reused
                del self._versions[next(iter(self._versions))]
            layout = wire.Layout.of(version.parameters)
            self._versions[version.version] = layout.pack(version.parameters, memory=self._version_memory)

    def admit(self, name: str) -> Identity:
        """A new identity for a worker that the coordinator starts. An older token of this name becomes invalid."""
        _, token = self.nodes.add(name, own=name)
        return Identity(certificate=self.keys.certificate, token=token)

    def end_kicked(self) -> None:
        """End the sessions of nodes that are not in the list of nodes any more. They are no standbys either."""
        working = set(map(node_of, list(self._sessions)))
        for name in sorted((working | self._standby.members) - self.nodes.nodes().keys()):
            self._standby.forget(name)
            self._end_all(name, Stop(reason=KICKED, refused=True), why=KICK)

    def _end_all(self, node: str, stop: Stop, *, why: str) -> None:
        for session in list(self._sessions.values()):
            if node_of(session.worker) == node:
                self._end(session, stop, why=why)

    def close(self) -> None:
        """Close the port, end all sessions, and let the last messages leave. Safe to call twice."""
        ended = [server.stop(STOP_SECONDS) for server in self._servers]  # from here on no session begins
        ended_work = Message("the run has ended") if self._jobs is None else Message("the queue or search has ended")
        for session in list(self._sessions.values()):
            self._end(session, Stop(reason=ended_work))
        for each in ended:
            each.wait(2 * STOP_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)  # threads end at once, not when they are collected

    # -- a session -----------------------------------------------------------------------------------------------------

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with refusing(context):
            session = self._begin(self._worker(context))
        reader = threading.Thread(target=self._read, args=(session, requests), name=f"reads-{session.worker}")
        reader.start()
        try:
            while (message := session.outbox.get()) is not None:
                yield wire.encode(message)
        finally:
            self._end(session, why=DISCONNECTED)

    def _begin(self, worker: str) -> _Session:
        """Begin a session, and end an older one of the same worker."""
        session, reason = _Session(worker), Message("a newer session of the same node has begun")
        while (older := self._sessions.setdefault(worker, session)) is not session:
            self._end(older, Stop(reason=reason, refused=True), why=reason)
        return session

    def _read(self, session: _Session, requests: Iterator[bytes]) -> None:
        """Handle all messages of a worker until its connection ends."""
        try:
            for request in requests:
                self._take(session, wire.decode(request, *self._kinds), requests)
        except LinkError as error:
            self._end(session, Stop(reason=error.message, refused=True), why=error.message)
        except grpc.RpcError:  # the connection broke
            pass
        finally:
            self._end(session, why=DISCONNECTED)

    def _take(self, session: _Session, message: Any, requests: Iterator[bytes]) -> None:
        """Handle one message. Raises LinkError for tensors that do not match it."""
        if isinstance(message, Contribution) and message.valid:
            chunks, began = self._chunks(session, requests), time.monotonic()
            tensors = wire.received(chunks, self._contributions, memory=self._upload_memory)
            seconds = message.transfer_seconds + time.monotonic() - began
            message = replace(message, tensors=tensors, transfer_seconds=seconds)
        match message:
            case Goodbye(reason=reason):
                self._end(session, why=reason or DISCONNECTED)
            case _ if self._sessions.get(session.worker) is not session:
                pass
            case Progress():
                session.progress = message
                self._deliver_progress(session)
            case _:
                if isinstance(message, Hello):
                    log.log(NOTE, "%s joined", session.worker)
                self._receive(session.worker, message)

    def _chunks(self, session: _Session, requests: Iterator[bytes]) -> Iterator[bytes]:
        """The chunks behind a contribution. Each counts as progress, since heartbeats wait behind them."""
        for chunk in requests:
            session.chunks += 1
            self._deliver_progress(session)
            yield chunk
        raise grpc.RpcError  # it ended in the middle

    def _deliver_progress(self, session: _Session) -> None:
        said = session.progress
        self._receive(session.worker, replace(said, micro_steps=said.micro_steps + session.chunks))

    def _end(self, session: _Session, stop: Stop | None = None, *, why: str = "") -> None:
        """End a session, if it is still open: its messages no longer count, but `stop` is still sent. `why`: the reason
        of the Goodbye that the coordinator gets; "" if it has decided the end itself."""
        with self._lock:
            if self._sessions.get(session.worker) is not session:
                return
            del self._sessions[session.worker]
        if stop is not None:
            session.outbox.put(stop)
        session.outbox.put(None)
        with suppress(LinkError):  # a damaged list
            if why == DISCONNECTED and node_of(session.worker) not in self.nodes.nodes():
                why = KICK  # it ended when its next call was refused
        if why:
            self._receive(session.worker, Goodbye(reason=why))
            log.log(NOTE, "%s left: %s", session.worker, why)

    # -- calls beside a session ----------------------------------------------------------------------------------------

    def _call(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with refusing(context):
            if secret := metadata_of(context, wire.INVITE_KEY):
                self.invites.check(secret)  # before the server waits for the message; once more under the lock
                enroll = wire.decode(next(requests, b""), Enroll)
                yield wire.encode(self._let_in(enroll, secret, own=self._listed_name(context) or ""))
                return
            worker = self._worker(context)
            asked = wire.decode(next(requests, b""), *ASKED)
            match asked:
                case Describe():
                    yield wire.encode(self._description)
                case Leave():
                    self._leave_crew(node_of(worker))
                case Download():
                    yield from self._download(worker, asked)
                case Check():
                    deque(requests, maxlen=0)
                    yield from wire.noise(asked.seconds)
                case CheckpointFile() if self._jobs is not None:
                    session = self._sessions.get(worker)
                    try:  # a kick, or another end of its session, ends the upload, too
                        chunks = itertools.takewhile(lambda _: self._sessions.get(worker) is session, requests)
                        self._jobs.keep(worker, asked, chunks)
                    except ResourceError as error:  # no room here: the machine leaves for now, and both say why
                        if session is not None:
                            self._end(session, Stop(reason=error.message, again=True), why=error.message)
                        raise
                case Follow():
                    announced = max([0, *self._versions])
                    yield wire.encode(self._standby.missing(node_of(worker), asked, announced=announced))

    def _let_in(self, asked: Enroll, secret: bytes, *, own: str) -> Enrolled:
        """Use the invite once to give a node a name and a token. `own`: the name it already has, or "".
        Raises CuadrillaError."""
        with self.invites.letting_in(secret):
            name, token = self.nodes.add(asked.name, own=own)
            if name != own:
                self._standby.joined(name)
        log.info("%s joined the crew", name)
        if name != asked.name:
            log.log(NOTE, "a new machine calls itself %s, as another does: here it is %s", asked.name, name)
        return Enrolled(token=token, name=name)

    def _leave_crew(self, name: str) -> None:
        """Raises CuadrillaError."""
        stop = Stop(reason=Message("this machine has left the crew"), refused=True)
        self._end_all(name, stop, why=Message("it has left the crew"))
        self.nodes.remove(name)
        self._standby.forget(name)
        log.log(NOTE, "%s has left the crew; with an invite it may come back", name)

    def _download(self, worker: str, wanted: Download) -> Iterator[bytes]:
        """The bytes of a version or a file; none of a file that was removed. Raises LinkError if it is not offered."""
        packed = None if wanted.version is None else self._versions.get(wanted.version)
        if packed is not None:
            yield from wire.chunks([packed])
            return
        path, _ = self._offer.files.get(wanted.path, (None, ""))
        path = path or (self._jobs or self._standby).file(worker, wanted.path)
        if path is None:
            raise LinkError("the coordinator does not offer this file or version")
        with suppress(FileNotFoundError):
            yield from wire.file_chunks(path, wanted.offset)

    # -- authentication ------------------------------------------------------------------------------------------------

    def _worker(self, context: Any) -> str:
        """The calling worker, NODE or NODE/DEVICE. Raises Refused for a stranger; LinkError."""
        name = self._listed_name(context)
        if name is None:
            raise Refused(NOT_LISTED)
        device = metadata_of(context, wire.DEVICE_KEY)[:MAX_DEVICE_NAME]
        return f"{name}/{device}" if device else name

    def _listed_name(self, context: Any) -> str | None:
        """The node whose token is in the call's metadata; None for a stranger. Raises LinkError for a damaged list."""
        return self.nodes.name_of(metadata_of(context, wire.TOKEN_KEY))


def start_server(
    address: str, calls: Mapping[str, Any], *, keys: Identity, pool: ThreadPoolExecutor
) -> tuple[Any, int]:
    """Start a gRPC server at HOST:PORT, which answers in threads of `pool`. Returns it and its port.

    A client that pings more often than every 2 s is disconnected.
    """
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 16),
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
        *wire.PINGS,
        ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ]
    handlers = {name: grpc.stream_stream_rpc_method_handler(call) for name, call in calls.items()}
    server = grpc.server(pool, handlers=[grpc.method_handlers_generic_handler(wire.SERVICE, handlers)], options=options)
    port = server.add_secure_port(address, grpc.ssl_server_credentials([(keys.key, keys.certificate)]))
    server.start()
    return server, port


def metadata_of(context: Any, key: str) -> Any:
    """A value in a call's metadata; "" if it is not there."""
    return dict(context.invocation_metadata()).get(key, "")


@contextmanager
def refusing(context: Any) -> Iterator[None]:
    """Ends a call with the status and text of an error, as `client.as_link_error` reads them."""
    try:
        yield
    except CuadrillaError as error:
        codes = grpc.StatusCode
        code = codes.PERMISSION_DENIED if isinstance(error, Refused) else codes.INVALID_ARGUMENT
        context.abort(code, error.message)
