"""The coordinator's side of the crew link: gRPC over TLS on one port, which workers dial.

`CrewServer.send` puts a message on its way to a worker, and what workers say goes to a `Receiver`. Messages of one
worker are handled in their order, by a thread of its own.

There are three calls. `Session` carries a worker's messages both ways, as long as it works. `Enroll` is for strangers.
`Call` is everything else: a message and the bytes that belong to it, answered by a message or by bytes.

Invariants
* Who calls is decided by the token in the call's metadata and the list of nodes, at every call. `Enroll` alone asks for
  the secret of an open invite instead.
* A node has one worker, or one for each device that its calls name, `MAX_DEVICES` at most; its token speaks for all.
* A worker has one session: a newer one ends the older one, whose late messages no longer count.
* A node that is kicked has no call that goes on.
* Nothing is allocated for a peer beyond the tensors that its run expects of it, and two sets of them at most.
* A connection that ends without goodbye is a worker that left; a silent one is found by the coordinator's clock.
"""

import logging
import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.host.descriptors import allow_descriptors
from cuadrilla.link import wire
from cuadrilla.link.address import check_free
from cuadrilla.link.base import (
    KICKED,
    MAX_DEVICES,
    NOT_LISTED,
    OWN_WORKER,
    PAUSED,
    Busy,
    Check,
    Contribution,
    Describe,
    Done,
    Download,
    Enroll,
    Enrolled,
    Follow,
    Goodbye,
    Hello,
    Leave,
    Measure,
    NodeReport,
    Offer,
    Progress,
    Refused,
    RunDescription,
    Stop,
    ToCoordinator,
    ToWorker,
    Version,
    node_of,
    offered,
    worker_name,
)
from cuadrilla.link.calls import (
    DEVICE_KEY,
    INVITE_KEY,
    MAX_CALLS,
    MAX_WORKERS,
    NUM_THREADS,
    SERVICE,
    TOKEN_KEY,
    bytes_for,
    cut_off,
    measure_arriving,
    refusing,
    said,
    start_server,
)
from cuadrilla.link.identity import Identity, open_coordinator
from cuadrilla.link.invite import Invites
from cuadrilla.link.jobs import JobNews, JobReceiver, Keep, Order
from cuadrilla.link.nodes import AllowList, NameTaken
from cuadrilla.link.standby import StandbyServer
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.version import __version__

DESCRIPTORS = 16_384
"""Files of this process: 1,500 connections that say nothing would lock a server whose limit is 1,024."""
END_SECONDS = 1.0
"""A session that is over may say so for this long, then its call is cut off, whether or not the peer reads."""
STOP_SECONDS = 5.0
KEPT_VERSIONS = 2
"""A worker may still be reading the version before the newest one."""
NOTHING = Offer(config="", files={})
KEPT_UPLOADS = 4
"""The memory of this many contributions is kept for the next round; more workers pay for fresh memory."""

SAID = (Hello, Progress, Goodbye, NodeReport, JobNews)
"""What a worker says in its session; contributions are uploaded."""
ASKED = (Describe, Leave, Contribution, Keep, Download, Check, Measure, Follow)
"""What a node says in a call of its own."""

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who hears the workers. Called from the threads of the link; it never raises."""

    def deliver(self, worker: str, message: ToCoordinator) -> None: ...

    def heard(self, worker: str, progress: Progress) -> None:
        """A heartbeat: must return at once, whatever else is going on."""

    def reported(self, worker: str, report: NodeReport) -> None:
        """How its machine is. Must return at once, too."""

    def left(self, worker: str, reason: str) -> None: ...


@dataclass(eq=False)
class _Session:
    worker: str
    context: Any
    outbox: "queue.SimpleQueue[ToWorker | Order | None]" = field(default_factory=queue.SimpleQueue)
    reason: str = Message("the connection ended")
    joined: bool = False
    """It has said Hello: heartbeats of a node that is still loading its data say nothing about this run."""
    over: bool = False
    """What it says counts no more, and its end is no news."""
    sending: Any = None
    """The newest call that brings a contribution or a file."""
    progress: Progress = field(default_factory=lambda: Progress(micro_steps=0))
    chunks: int = 0
    """Each that has arrived is progress, too: on a slow line heartbeats wait behind them."""

    @property
    def node(self) -> str:
        return node_of(self.worker)

    def check(self) -> None:
        """Raises LinkError once nothing counts any more that it says."""
        if self.over or not self.joined:
            raise LinkError("its session has ended", hint="it joins again")


class CrewServer:
    """Serves one run, or with `jobs` machines that train whole runs. `folder`: of the crew's keys and nodes;
    `parameters`: the tensors of a version; `contribution`: those of an answer. Raises LinkError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        receiver: Receiver,
        offer: Offer = NOTHING,
        contributions: Sequence[wire.Layout] = (),
        standby: StandbyServer | None = None,
        jobs: JobReceiver | None = None,
        term: int = 0,
    ) -> None:
        self._term = term
        self.keys, self.nodes = open_coordinator(folder), AllowList(folder / "nodes.json")
        self._receiver = receiver
        self._offer, self._contributions = offer, contributions
        self._versions: dict[int, memoryview] = {}
        self._version_memory, self._upload_memory = wire.Memory(keep=1), wire.Memory(keep=KEPT_UPLOADS)
        self._standby = standby or StandbyServer()
        self._jobs = jobs
        self._invites = Invites()
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._calls: dict[Any, str] = {}
        """The node of each call that goes on, by its context."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="crew-link")
        self._servers: list[Any] = []
        self._paused: frozenset[str] = frozenset()
        self._listed = set(self.nodes.nodes())

    # -- for the engine ------------------------------------------------------------------------------------------------

    def serve(self, address: str) -> int:
        """Listen at HOST:PORT (0: any free port), too; returns the port. Raises LinkError."""
        allow_descriptors(DESCRIPTORS)
        check_free(address)
        server, port = start_server(address, handlers=self._handlers(), keys=self.keys, pool=self._pool)
        self._servers.append(server)
        return port

    def send(self, worker: str, message: ToWorker | Order) -> None:
        """Put a message on its way; a worker without a session gets nothing.

        A `Version`'s parameters are copied now: the weights of record may change before the worker has read them.
        """
        if isinstance(message, Version):
            self._publish(message)
            self._standby.announced = message.version
            message = replace(message, standbys=tuple(self._standby.addresses()), term=self._term)
        with self._lock:
            session = self._sessions.get(worker)
        if session is None:
            return
        if isinstance(message, Stop):
            self._end(session, message)
        else:
            session.outbox.put(message)

    def _publish(self, version: Version) -> None:
        """Keep its parameters as they are now, for whoever is told of it; once for all of them."""
        if version.version not in self._versions:
            assert isinstance(version.parameters, Mapping)
            if len(self._versions) >= KEPT_VERSIONS:  # first: its memory can hold the new one
                del self._versions[next(iter(self._versions))]
            layout = wire.Layout.of(version.parameters)
            packed = layout.pack(version.parameters, memory=self._version_memory)
            self._versions[version.version] = packed

    def adopt_invites(self, invites: Mapping[bytes, int]) -> None:
        """Let new nodes in for a while: SHA-256 of an invite's secret → for how many nodes it is good."""
        for secret_hash, uses in invites.items():
            self._invites.adopt(secret_hash, uses=uses, now=monotonic())

    def admit(self, name: str) -> Identity:
        """Of a worker that the coordinator starts. That of an earlier run ends."""
        _, token = self.nodes.add(name, own=name)
        return Identity(certificate=self.keys.certificate, token=token)

    def end_kicked(self) -> None:
        """End the calls of nodes that the allow-list does not hold any more."""
        with self._lock:
            listed = set(self.nodes.nodes())
            known = self._listed | {session.node for session in self._sessions.values()}
            self._listed = listed
        for name in sorted(known - listed):
            log.info("%s was kicked", name, extra=TALK)
            self._dismiss({name}, Stop(reason=KICKED, refused=True), why=Message("it was kicked"))
        for context, node in list(self._calls.items()):
            if node not in listed:
                cut_off(context, after=END_SECONDS)

    def pause(self, nodes: frozenset[str]) -> None:
        """These are to wait, and no others: their sessions end, and no new ones begin."""
        with self._lock:
            begun, self._paused = nodes - self._paused, nodes
        for worker in self._dismiss(begun, Stop(reason=PAUSED, again=True), why=PAUSED):
            self._receiver.reported(worker, NodeReport(phase="paused"))

    def _dismiss(self, nodes: Collection[str], stop: Stop, *, why: str) -> list[str]:
        """End the sessions of these nodes; the workers that had one."""
        with self._lock:
            sessions = [session for session in self._sessions.values() if session.node in nodes]
        for session in sessions:
            self._end(session, stop)
            self._receiver.left(session.worker, why)
        return [session.worker for session in sessions]

    def workers(self) -> list[str]:
        """Who has a session now."""
        with self._lock:
            return sorted(self._sessions)

    def close(self) -> None:
        """End all sessions, give messages on their way a moment, close the port. Safe to call twice."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            self._end(session, Stop(reason=Message("the run has ended")))
        self._standby.closing.set()
        while self._servers:
            self._servers.pop().stop(STOP_SECONDS).wait(2 * STOP_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)  # threads end at once, not when they are collected

    # -- a session -----------------------------------------------------------------------------------------------------

    def _handlers(self) -> Any:
        stream = grpc.stream_stream_rpc_method_handler
        session = stream(self._session, response_serializer=wire.encode)
        calls = {"Enroll": stream(self._enroll), "Session": session, "Call": stream(self._call)}
        return grpc.method_handlers_generic_handler(SERVICE, calls)

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[ToWorker | Order]:
        with refusing(context):
            session = self._begin(self._worker(context), context)
        reader = threading.Thread(target=self._read, args=(session, requests), name=f"reads-{session.worker}")
        reader.start()
        try:
            while (message := session.outbox.get()) is not None:
                yield message
        finally:
            self._forget(session)

    def _begin(self, worker: str, context: Any) -> _Session:
        """A new session, which ends the worker's older one. Raises Refused, Busy."""
        session = _Session(worker, context)
        with self._lock:  # a pause either finds the session, or is found
            if session.node in self._paused:
                raise Busy(PAUSED)
            others = [other for other in self._sessions.values() if other.worker != worker]
            if len(others) >= MAX_WORKERS:
                raise Refused("the crew is full: {most} workers", most=MAX_WORKERS)
            if sum(other.node == session.node for other in others) >= MAX_DEVICES:
                raise Refused("a node has {most} workers at most", most=MAX_DEVICES)
            older = self._sessions.get(worker)
            self._sessions[worker] = session
            if older is not None:
                older.over = True
        if older is not None:
            reason = Message("a newer session of the same node has begun")
            self._end(older, Stop(reason=reason, refused=True))
            self._receiver.left(worker, reason)
        return session

    def _read(self, session: _Session, requests: Iterator[bytes]) -> None:
        """Everything one worker says, until its connection ends."""
        try:
            for request in requests:
                self._take(session, wire.decode(request, *SAID))
        except LinkError as error:
            log.warning("%s: %s", session.worker, error.message)
            session.reason = error.message
            session.outbox.put(Stop(reason=error.message, refused=True))
        except grpc.RpcError:  # the connection broke
            pass
        finally:
            self._forget(session)
            session.outbox.put(None)
            cut_off(session.context, after=END_SECONDS)

    def _take(self, session: _Session, message: Hello | Progress | Goodbye | NodeReport | JobNews) -> None:
        """Raises LinkError for what no worker of ours says."""
        worker = session.worker
        match message:
            case _ if session.over:
                pass
            case Hello() | Goodbye():
                if not session.joined:
                    log.info("%s joined", worker, extra=TALK)
                session.joined, session.over = True, isinstance(message, Goodbye)
                self._receiver.deliver(worker, message)
            case _ if not session.joined:
                pass
            case Progress():
                session.progress = message
                self._tell_progress(session)
            case NodeReport():
                self._receiver.reported(worker, message)
            case JobNews() if self._jobs is not None:
                self._jobs.news(worker, message)
            case JobNews():
                raise LinkError("it reports about a job, and this run has none", hint="install the same version there")

    def _tell_progress(self, session: _Session) -> None:
        said = session.progress
        self._receiver.heard(session.worker, replace(said, micro_steps=said.micro_steps + session.chunks))

    def _end(self, session: _Session, stop: Stop) -> None:
        """From now on nothing that it says counts; it may still hear why."""
        session.over = True
        self._forget(session)
        session.outbox.put(stop)
        session.outbox.put(None)
        cut_off(session.context, after=END_SECONDS)

    def _forget(self, session: _Session) -> None:
        """The session is over; if that is news, its worker has left."""
        with self._lock:
            if self._sessions.get(session.worker) is session:
                del self._sessions[session.worker]
            is_news, session.over = not session.over, True
        if session.sending is not None:
            session.sending.cancel()
        if is_news:
            log.warning("%s left: %s", session.worker, session.reason)
            self._receiver.left(session.worker, session.reason)

    # -- calls beside a session ----------------------------------------------------------------------------------------

    def _call(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with refusing(context):
            worker = self._worker(context)
            asked = wire.decode(next(requests, b""), *ASKED)
            match asked:
                case Contribution() | Keep():
                    self._receive(self._sender(worker, context), asked, requests)
                    yield wire.encode(Done())
                case Describe():
                    yield wire.encode(self._describe())
                case Leave():
                    self._leave(node_of(worker))
                    yield wire.encode(Done())
                case Download():
                    yield from self._download(asked)
                case Check():
                    yield wire.encode(measure_arriving(requests))
                case Measure():
                    yield from bytes_for(asked.seconds)
                case Follow():
                    yield from self._standby.grown(node_of(worker), asked, goes_on=context.is_active)

    def _enroll(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        secret = said(context, INVITE_KEY) or b""
        with refusing(context):
            self._invites.check(secret, now=monotonic())
            asked = wire.decode(next(requests, b""), Enroll)
            yield wire.encode(self._let_in(asked, secret, own=self._listed_name(context) or ""))

    def _let_in(self, asked: Enroll, secret: bytes, *, own: str) -> Enrolled:
        """A name and a token, for one use of the invite. `own`: the machine's name so far. Raises CuadrillaError."""
        try:
            if OWN_WORKER.fullmatch(asked.name):
                told = "{name} is what workers of the coordinator's own machine are called"
                raise NameTaken(told, name=asked.name, hint="another name: cuadrilla join --name NAME")
            with self._invites.letting_in(secret, now=monotonic()):
                name, token = self.nodes.add(asked.name, numbered=asked.numbered, own=own)
        except NameTaken as error:
            log.info("a machine was not let in: %s; its invite is still good", error.message)
            raise
        log.info("%s joined the crew", name)
        if name != asked.name:
            log.info("a new machine calls itself %s, as another does: here it is %s", asked.name, name, extra=TALK)
        return Enrolled(token=token, name=name)

    def _describe(self) -> RunDescription:
        return RunDescription(
            config=self._offer.config,
            files=offered(self._offer.files),
            cuadrilla=__version__,
            term=self._term,
            takes_jobs=self._jobs is not None,
        )

    def _leave(self, name: str) -> None:
        """Raises CuadrillaError."""
        with self._lock:  # nobody takes it for one that was kicked
            self.nodes.remove(name)
            self._listed.discard(name)
        log.info("%s has left the crew; with an invite it may come back", name, extra=TALK)
        stop = Stop(reason=Message("this machine has left the crew"), refused=True)
        self._dismiss({name}, stop, why=Message("it has left the crew"))
        self._standby.forget(name)

    def _sender(self, worker: str, context: Any) -> _Session:
        """The session of a worker that sends something large: one at a time, the newest, since an older one may wait
        for a connection that is gone. Raises LinkError.
        """
        with self._lock:
            session = self._sessions.get(worker)
            if session is None:
                raise LinkError("it has no session", hint="it joins again")
            older, session.sending = session.sending, context
        if older is not None:
            older.cancel()
        return session

    def _receive(self, session: _Session, head: Contribution | Keep, chunks: Iterator[bytes]) -> None:
        """A contribution, with whose last byte its lease is answered, or a file of a job. Raises LinkError,
        ResourceError."""
        chunks = self._counted(session, chunks)
        if isinstance(head, Keep):
            if self._jobs is None:
                raise LinkError("nobody wants that file", hint="install the same version there")
            self._jobs.keep(session.worker, head, wire.whole(chunks, head.num_bytes))
            return
        if head.valid:
            head = replace(head, tensors=wire.received(chunks, self._contributions, memory=self._upload_memory))
        session.check()
        session.sending = None  # all of it is here: the end of the session is no reason to cut it off
        self._receiver.deliver(session.worker, head)

    def _counted(self, session: _Session, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Chunks, each of which is progress of the worker, as long as what it says counts. Raises LinkError."""
        for chunk in chunks:
            session.check()
            yield chunk
            session.chunks += 1
            self._tell_progress(session)
        session.check()

    def _download(self, wanted: Download) -> Iterator[bytes]:
        """Raises LinkError for what is not offered."""
        packed = None if wanted.version is None else self._versions.get(wanted.version)
        if packed is not None:
            yield from wire.chunks([packed])
            return
        path = self._file(wanted.sha256)
        if path is None:
            raise LinkError("what is asked for is not here")
        yield from wire.file_chunks(path, wanted.offset)

    def _file(self, name: str) -> Path | None:
        """A file of the offer, or of a job, by its SHA-256 in hexadecimal."""
        for path, sha256 in self._offer.files.values():
            if sha256.hex() == name:
                return path
        return self._jobs.file(name) if self._jobs is not None else None

    # -- who calls -----------------------------------------------------------------------------------------------------

    def _worker(self, context: Any) -> str:
        """The name of the worker that calls: of a node, or of one device of it. Raises Refused, Busy, LinkError."""
        name = self._listed_name(context)
        if name is None:
            raise Refused(NOT_LISTED)
        worker = worker_name(name, said(context, DEVICE_KEY))
        if list(self._calls.values()).count(name) >= MAX_CALLS:
            raise Busy("too many calls at once")
        self._calls[context] = name
        if not context.add_callback(lambda: self._calls.pop(context, None)):  # it has ended meanwhile
            del self._calls[context]
        return worker

    def _listed_name(self, context: Any) -> str | None:
        """Which node's token a call shows; None for a stranger."""
        try:
            return self.nodes.name_of(said(context, TOKEN_KEY))
        except LinkError as error:
            log.warning("%s", error.message)
            return None
