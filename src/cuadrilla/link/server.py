"""The coordinator's side of the crew link: gRPC over TLS on one port, which workers dial.

`CrewServer` does for machines what `inproc.InProcServer` does for threads: `send` puts a message on its way to a
worker, and what workers say goes to a `Receiver`. Messages of one worker are handled in their order, by a thread of its
own.

Invariants
* Who calls is decided by the token in the call's metadata and the list of nodes, at every call. `Enroll` alone asks for
  the secret of an open invite instead.
* A node has one worker, or one for each device that its calls name, `MAX_DEVICES` at most; its token speaks for all.
* A worker has one session: a newer one ends the older one, whose late messages no longer count.
* A node that is kicked has no call that goes on.
* Nothing is allocated for a peer beyond the tensors that its run expects of it, and two sets of them at most.
* A connection that ends without goodbye is a worker that left; a silent one is found by the coordinator's clock.
"""

import hmac
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import grpc

from cuadrilla.errors import CuadrillaError, LinkError, ResourceError
from cuadrilla.host.descriptors import allow_descriptors
from cuadrilla.link import check, wire
from cuadrilla.link.address import check_free
from cuadrilla.link.base import (
    KICKED,
    MAX_DEVICES,
    NOT_LISTED,
    OWN_WORKER,
    PAUSED,
    Clock,
    Contribution,
    Download,
    Enroll,
    Enrolled,
    Follow,
    Goodbye,
    Hello,
    Measure,
    NodeReport,
    Nothing,
    Progress,
    Stop,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
    node_of,
    worker_name,
)
from cuadrilla.link.calls import (
    DEVICE_KEY,
    INVITE_KEY,
    MAX_WORKERS,
    SERVICE,
    TOKEN_KEY,
    Calls,
    RunningServer,
    cut_off,
    first,
    handler,
    refuse,
    said,
    start_server,
)
from cuadrilla.link.identity import CoordinatorKeys
from cuadrilla.link.invite import Invites, Redemption
from cuadrilla.link.jobs import JobNews, JobReceiver, Keep, Order
from cuadrilla.link.nodes import AllowList, NameTaken
from cuadrilla.link.offer import Offer, RunDescription, offered, take_file
from cuadrilla.link.standby import StandbyServer
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.version import __version__

DESCRIPTORS = 16_384
"""Files of this process: 1,500 connections that say nothing would lock a server whose limit is 1,024."""
ENROL_SECONDS = 5.0
END_SECONDS = 1.0
"""A session that is over may say so for this long, then its call is cut off, whether or not the peer reads."""
STOP_SECONDS = 5.0
KEPT_VERSIONS = 2
"""A worker may still be reading the version before the newest one."""
KEPT_UPLOADS = 4
"""The memory of this many contributions is kept for the next round; more workers pay for fresh memory."""

SAID = (Hello, Progress, Goodbye, NodeReport, JobNews)
"""What a worker says in its session; contributions are uploaded."""

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who hears the workers. Called from the threads of the link; it never raises."""

    def deliver(self, worker: str, message: ToCoordinator) -> None: ...

    def heard(self, worker: str, progress: Progress) -> None:
        """A heartbeat: must return at once, whatever else is going on."""

    def reported(self, worker: str, report: NodeReport) -> None:
        """How its machine is. Must return at once, too."""

    def left(self, worker: str, reason: str) -> None: ...


@dataclass(eq=False, kw_only=True)
class _Served:
    """What the workers of a run read and say: its files, its versions, the memory of their answers.

    `contribution`: what the tensors of an answer look like; `parameters`: those of a version.
    """

    offer: Offer
    parameters: wire.Layout
    contribution: wire.Layout
    upload_memory: wire.Memory = field(default_factory=lambda: wire.Memory(keep=KEPT_UPLOADS))
    _version_memory: wire.Memory = field(init=False, default_factory=lambda: wire.Memory(keep=1))
    versions: dict[int, memoryview] = field(init=False, default_factory=dict)

    def publish(self, version: Version) -> None:
        """Keep its parameters as they are now, for whoever is told of it; once for all of them."""
        number = version.version
        if number not in self.versions:
            assert isinstance(version.parameters, Mapping)
            if len(self.versions) >= KEPT_VERSIONS:  # first: its memory can hold the new one
                del self.versions[next(iter(self.versions))]
            self.versions[number] = self.parameters.pack(version.parameters, memory=self._version_memory)


@dataclass(eq=False)
class _Session:
    worker: str
    context: Any
    node: str
    outbox: "queue.SimpleQueue[ToWorker | Order | None]" = field(default_factory=queue.SimpleQueue)
    reason: str = Message("the connection ended")
    joined: bool = False
    """It has said Hello: heartbeats of a node that is still loading its data say nothing about this run."""
    sending: Any = None
    """The call that brings a contribution or a file."""
    receiving: threading.Lock = field(default_factory=threading.Lock)
    """Held by that call."""
    arriving: wire.Assembly = field(default_factory=lambda: wire.Assembly(0))
    """What is here of a contribution."""
    progress: Progress = field(default_factory=lambda: Progress(micro_steps=0))
    chunks: int = 0
    """What has arrived of its contributions is progress too: on a slow line heartbeats wait behind them."""
    expected: bool = False
    """Its end is no news: the worker said goodbye, or was told to stop."""


class CrewServer:
    """Serves one run, or with `jobs` machines that train whole runs. `parameters` and `contribution`: see `_Served`."""

    def __init__(
        self,
        *,
        keys: CoordinatorKeys,
        nodes: AllowList,
        receiver: Receiver,
        offer: Offer,
        parameters: wire.Layout,
        contribution: wire.Layout,
        standby: StandbyServer | None = None,
        jobs: JobReceiver | None = None,
        term: int = 0,
    ) -> None:
        self._term = term
        self._keys = keys
        self._nodes = nodes
        self._receiver = receiver
        self._served = _Served(offer=offer, parameters=parameters, contribution=contribution)
        self._standby = standby or StandbyServer()
        self._jobs = jobs
        self._invites = Invites()
        self._enrolling = threading.Lock()
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._calls = Calls()
        self._servers: list[RunningServer] = []
        self._paused: frozenset[str] = frozenset()
        self._listed = set(nodes.nodes())

    # -- for the engine ------------------------------------------------------------------------------------------------

    def serve(self, address: str) -> int:
        """Listen at HOST:PORT (0: any free port), too; returns the port. Raises LinkError."""
        allow_descriptors(DESCRIPTORS)
        check_free(address)
        self._servers.append(start_server(address, handlers=self._handlers(), keys=self._keys))
        return self._servers[-1].port

    def send(self, worker: str, message: ToWorker | Order) -> None:
        """Put a message on its way; a worker without a session gets nothing.

        A `Version`'s parameters are copied now: the weights of record may change before the worker has read them.
        """
        if isinstance(message, Version):
            self._served.publish(message)
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

    def adopt_invites(self, invites: Mapping[bytes, int]) -> None:
        """Let new nodes in for a while: SHA-256 of an invite's secret → for how many nodes it is good."""
        with self._enrolling:
            for secret_hash, uses in invites.items():
                self._invites.adopt(secret_hash, uses=uses, now=monotonic())

    def end_kicked(self) -> None:
        """End the sessions of nodes that the allow-list does not hold any more."""
        with self._lock:
            listed = set(self._nodes.nodes())
            known = self._listed | {session.node for session in self._sessions.values()}
            self._listed = listed
        for name in sorted(known - listed):
            log.info("%s was kicked", name, extra=TALK)
            self._dismiss(name, KICKED, why=Message("it was kicked"))
        self._calls.end_all_but(listed, after=END_SECONDS)

    def _dismiss(self, node: str, told: str, *, why: str) -> None:
        """End the sessions of a node that is none any more."""
        with self._lock:
            sessions = [session for session in self._sessions.values() if session.node == node]
        for session in sessions:
            self._end(session, Stop(reason=told, refused=True))
            self._receiver.left(session.worker, why)

    def pause(self, nodes: frozenset[str]) -> None:
        """These are to wait, and no others: their sessions end, and no new ones begin."""
        with self._lock:
            begun, self._paused = nodes - self._paused, nodes
            held = [session for session in self._sessions.values() if session.node in begun]
        for session in held:
            self._end(session, Stop(reason=PAUSED, again=True))
            self._receiver.reported(session.worker, NodeReport(phase="paused"))
            self._receiver.left(session.worker, PAUSED)

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
            self._servers.pop().stop(STOP_SECONDS)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _handlers(self) -> Any:
        stream = grpc.stream_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Enroll": handler(self._enroll),
                "Leave": handler(self._leave),
                "Describe": handler(self._describe),
                "Session": stream(self._session, response_serializer=wire.encode),
                "Upload": handler(self._upload),
                "Keep": handler(self._keep),
                "Download": stream(self._download),
                "Check": handler(self._check),
                "Receive": stream(self._receive),
                "Follow": stream(self._follow),
            },
        )

    def _enroll(self, requests: Iterator[bytes], context: Any) -> Enrolled:
        secret = said(context, INVITE_KEY)
        with self._enrolling:
            outcome = self._invites.look_up(secret or b"", now=monotonic())
        if outcome is not Redemption.ACCEPTED:
            refuse(context, outcome.value)
        cut_off(context, after=ENROL_SECONDS)
        request = first(requests, Enroll, context)
        try:
            name, token = self._let_in(request, secret, own=self._listed_name(context) or "")
        except NameTaken as error:
            log.info("a machine was not let in: %s; its invite is still good", error.message)
            refuse(context, error.message, code=grpc.StatusCode.ALREADY_EXISTS)
        except CuadrillaError as error:
            refuse(context, error.message)
        log.info("%s joined the crew", name)
        if name != request.name:
            log.info("a new machine calls itself %s, as another does: here it is %s", request.name, name, extra=TALK)
        return Enrolled(token=token, name=name)

    def _let_in(self, request: Enroll, secret: bytes, *, own: str) -> tuple[str, str]:
        """The node's name and token, for one use of the invite. Raises CuadrillaError."""
        if OWN_WORKER.fullmatch(request.name):
            told = "{name} is what workers of the coordinator's own machine are called"
            raise NameTaken(told, name=request.name, hint="another name: cuadrilla join --name NAME")
        with self._enrolling:
            outcome = self._invites.look_up(secret, now=monotonic())
            if outcome is not Redemption.ACCEPTED:
                raise LinkError("{reason}", reason=outcome.value, hint="ask for a new invite")
            let_in = self._nodes.add(request.name, numbered=request.numbered, own=own)
            self._invites.use(secret)
        return let_in

    def _leave(self, _requests: Iterator[bytes], context: Any) -> Nothing:
        name = self._caller(context)
        with self._lock:  # nobody takes it for one that was kicked
            try:
                self._nodes.remove(name)
            except CuadrillaError as error:
                refuse(context, error.message, code=grpc.StatusCode.UNAVAILABLE)
            self._listed.discard(name)
        log.info("%s has left the crew; with an invite it may come back", name, extra=TALK)
        self._dismiss(name, Message("this machine has left the crew"), why=Message("it has left the crew"))
        self._standby.forget(name)
        return Nothing()

    def _describe(self, _requests: Iterator[bytes], context: Any) -> RunDescription:
        self._caller(context)
        offer = self._served.offer
        return RunDescription(
            config=offer.config,
            files=offered(offer.files),
            cuadrilla=__version__,
            term=self._term,
            takes_jobs=self._jobs is not None,
        )

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[ToWorker | Order]:
        worker = self._worker(context)
        session = _Session(worker, context, node_of(worker))
        with self._lock:  # a pause either finds the session, or is found
            if session.node in self._paused:
                refuse(context, PAUSED, code=grpc.StatusCode.RESOURCE_EXHAUSTED)
            others = [other for other in self._sessions.values() if other.worker != worker]
            if len(others) >= MAX_WORKERS:
                refuse(context, Message("the crew is full: {most} workers", most=MAX_WORKERS))
            if sum(other.node == session.node for other in others) >= MAX_DEVICES:
                refuse(context, Message("a node has {most} workers at most", most=MAX_DEVICES))
            older = self._sessions.get(session.worker)
            self._sessions[session.worker] = session
        if older is not None:
            reason = Message("a newer session of the same node has begun")
            self._end(older, Stop(reason=reason, refused=True))
            self._receiver.left(session.worker, reason)
        reader = threading.Thread(target=self._read, args=(session, requests), name=f"reads-{session.worker}")
        reader.start()
        try:
            while (message := session.outbox.get()) is not None:
                yield message
        finally:
            self._forget(session)

    def _read(self, session: _Session, requests: Iterator[bytes]) -> None:
        """Everything one worker says, until its connection ends."""
        try:
            for request in requests:
                with self._lock:
                    if self._sessions.get(session.worker) is not session:
                        return
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
            case Hello() | Goodbye():
                if not session.joined:
                    log.info("%s joined", worker, extra=TALK)
                session.joined = True
                session.expected = session.expected or isinstance(message, Goodbye)
                self._receiver.deliver(worker, message)
            case _ if not session.joined or session.expected:
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
        session.expected = True
        self._forget(session)
        session.outbox.put(stop)
        session.outbox.put(None)
        cut_off(session.context, after=END_SECONDS)

    def _forget(self, session: _Session) -> None:
        """The session is over; if it is still its worker's newest, the worker has left."""
        with self._lock:
            newest = self._sessions.get(session.worker) is session
            if newest:
                del self._sessions[session.worker]
        if newest and not session.expected:
            log.warning("%s left: %s", session.worker, session.reason)
            self._receiver.left(session.worker, session.reason)

    def _upload(self, requests: Iterator[bytes], context: Any) -> Nothing:
        """A contribution; with its last byte the lease is answered."""
        with self._sending(context) as session:
            said = first(requests, Contribution, context)
            if said.valid:
                said = replace(said, tensors=self._receive_tensors(session, requests))
            self._check_counts(session)
            self._receiver.deliver(session.worker, said)
        return Nothing()

    def _receive_tensors(self, session: _Session, chunks: Iterator[bytes]) -> Tensors:
        """Raises LinkError. Only the session holds what has arrived: a call that broke keeps its memory for long."""
        layout = self._served.contribution
        session.arriving = wire.Assembly(layout.num_bytes, memory=self._served.upload_memory)
        for chunk in chunks:
            self._check_counts(session)
            session.arriving.add(chunk)
            session.chunks += 1
            self._tell_progress(session)
        session.arriving.check_complete()
        blob, session.arriving = session.arriving.blob, wire.Assembly(0)
        return layout.unpack(blob)

    def _check_counts(self, session: _Session) -> None:
        """Raises LinkError when nothing counts any more that a worker says in this session."""
        with self._lock:
            newest = self._sessions.get(session.worker) is session
        if not newest or not session.joined or session.expected:
            raise LinkError("its session has ended", hint="it joins again")

    def _keep(self, requests: Iterator[bytes], context: Any) -> Nothing:
        """A file of a job."""
        with self._sending(context) as session:
            if (jobs := self._jobs) is None:
                raise LinkError("nobody wants that file", hint="install the same version there")
            file, worker = first(requests, Keep, context), session.worker
            target = jobs.place_for(worker, file.name)
            arriving = wire.Arriving(file.num_bytes)
            take_file(target, arriving, requests, check_wanted=lambda: jobs.goes_on(worker, target))
        return Nothing()

    @contextmanager
    def _sending(self, context: Any) -> Iterator[_Session]:
        """The session of a worker that sends something large: one at a time, the newest, since an older one may wait
        for a connection that is gone. What cannot be taken ends the call.
        """
        session = self._session_of(context)
        with self._lock:
            older, session.sending = session.sending, context
        if older is not None:
            older.cancel()
        try:
            with session.receiving:  # the older one ends first
                yield session
        except (LinkError, ResourceError) as error:
            refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
        finally:
            with self._lock:
                session.sending = None if session.sending is context else session.sending

    def _session_of(self, context: Any) -> _Session:
        """That of the worker that calls; ends a call without one."""
        worker = self._worker(context)
        with self._lock:
            session = self._sessions.get(worker)
        if session is None:
            refuse(context, "no session", code=grpc.StatusCode.FAILED_PRECONDITION)
        return session

    def _download(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._caller(context)
        wanted = first(requests, Download, context)
        packed = None if wanted.version is None else self._served.versions.get(wanted.version)
        if packed is not None:
            yield from wire.chunks([packed])
            return
        path = self._file(wanted.sha256)
        if path is None:
            refuse(context, Message("what is asked for is not here"), code=grpc.StatusCode.NOT_FOUND)
        yield from wire.file_chunks(path, wanted.offset)

    def _follow(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        name = self._caller(context)
        try:
            self._standby.check_named(name)
            request = first(requests, Follow, context)
            self._standby.remember(name, request.address)
        except LinkError as error:
            refuse(context, error.message)
        yield from self._standby.grown(request, goes_on=context.is_active)

    def _check(self, requests: Iterator[bytes], context: Any) -> Clock:
        self._caller(context)
        return check.take(requests)

    def _receive(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._caller(context)
        yield from check.give(first(requests, Measure, context).seconds)

    def _file(self, name: str) -> Path | None:
        """A file of the offer, or of a job, by its SHA-256 in hexadecimal."""
        for path, sha256 in self._served.offer.files.values():
            if hmac.compare_digest(sha256.hex().encode(), name.encode()):
                return path
        return self._jobs.file(name) if self._jobs is not None else None

    def _caller(self, context: Any) -> str:
        """The name of the node that calls; ends the call if it is none of this crew's."""
        return node_of(self._worker(context))

    def _worker(self, context: Any) -> str:
        """The name of the worker that calls: of a node, or of one device of it."""
        name = self._listed_name(context)
        if name is None:
            refuse(context, NOT_LISTED)
        try:
            worker = worker_name(name, said(context, DEVICE_KEY))
        except LinkError as error:
            refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
        self._calls.begin(name, context)
        return worker

    def _listed_name(self, context: Any) -> str | None:
        """Which node's token a call shows; None for a stranger."""
        try:
            return self._nodes.name_of(said(context, TOKEN_KEY))
        except LinkError as error:
            log.warning("%s", error.message)
            return None
