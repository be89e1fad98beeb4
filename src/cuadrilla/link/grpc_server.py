"""The coordinator's side of the crew link: gRPC with mutual TLS on one port, which workers dial.

`CrewServer` does for machines what `inproc.InProcServer` does for threads: `send` puts a message on its way to a
worker, and what workers say goes to a `Receiver`. Messages of one worker are handled in their order, by a thread of its
own.

Invariants
* Who calls is decided by the key of the caller's certificate and the allow-list, at every call. The published enrol
  certificate opens `Enroll` alone, which answers only while an invite is open.
* The network sees the gate (`gate.py`), which keeps seats free for those who are known.
* A node has one worker, or one for each device that its calls name, `MAX_DEVICES` at most; its key speaks for all.
* A worker has one session: a newer one of the same key ends the older one, whose late messages no longer count.
* A node answers its leases as fast as it can, and sends heartbeats; anything else that it says, and each session that
  it begins, costs us an event or a step of the coordinator, and is paced. Too much of it ends the session.
* Nothing is allocated for a peer beyond the tensors that its run expects of it, and two sets of them at most.
* A node that is lent to a run reads and says nothing in another one, and the run's coordinator reaches no other node.
* A connection that ends without goodbye is a worker that left; a silent one is found by the coordinator's clock.
"""

import hmac
import logging
import queue
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import grpc

from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.host.descriptors import allow_descriptors
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import (
    KICKED,
    LENT,
    NOT_LISTED,
    PAUSED,
    Computed,
    Contribution,
    Goodbye,
    Lease,
    NodeReport,
    Progress,
    Stop,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.link.gate import Gate
from cuadrilla.link.grpc_calls import (
    DESCRIPTORS_OF_A_WORKER,
    DEVICE_KEY,
    MAX_WORKERS,
    RUN_KEY,
    Admission,
    RunningServer,
    cut_off,
    only,
    reads,
    refuse,
    serialize,
    start_server,
)
from cuadrilla.link.grpc_check import CheckServer
from cuadrilla.link.grpc_jobs import KeepServer
from cuadrilla.link.grpc_ray import RayHeadServer
from cuadrilla.link.grpc_standby import StandbyServer
from cuadrilla.link.invite import Invites, Redemption
from cuadrilla.link.jobs import JobReceiver, Order, news_from_wire, order_to_wire
from cuadrilla.link.names import MAX_DEVICES, OWN_WORKER, node_of, worker_name
from cuadrilla.link.nodes import AllowList, NameTaken
from cuadrilla.link.offer import Offer
from cuadrilla.link.rate_limit import RateLimit
from cuadrilla.link.reports import report_from_wire
from cuadrilla.link.served import Receiver, Served
from cuadrilla.link.tls import CoordinatorKeys, is_enrol, peer_certificate
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.version import __version__

OTHER_DESCRIPTORS = 1024
"""Of this process: its files, strangers at the gate."""
SERVICE = pb.DESCRIPTOR.services_by_name["Crew"].full_name
ENROL_SECONDS = 5.0
END_SECONDS = 1.0
"""A session that is over may say so for this long, then its call is cut off, whether or not the peer reads."""
STOP_SECONDS = 5.0
NEWS_PER_SECOND, NEWS_AT_ONCE = 1.0, 60.0
"""Of one node, beside answers and heartbeats. One on a bad line begins a session and says Hello every few seconds."""
REPORTS_PER_SECOND, REPORTS_AT_ONCE = 0.5, 5.0
"""Of one worker: more than twice as many as it has reason to send."""
JOB_NEWS_PER_SECOND, JOB_NEWS_AT_ONCE = 8.0, 60.0
"""Of one worker; its jobs may be as short as a second, with rows, a checkpoint and an end."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Session:
    worker: str
    context: Any
    node: str
    served: Served
    uploads: wire.Uploads
    outbox: "queue.SimpleQueue[pb.ToWorker | None]" = field(default_factory=queue.SimpleQueue)
    reason: str = Message("the connection ended")
    version: str = ""
    leases: set[int] = field(default_factory=set)
    """Those that it has not answered yet."""
    computed: int = 0
    """The newest one that it has said to have computed."""
    joined: bool = False
    """It has said Hello: heartbeats of a node that is still loading its data say nothing about this run."""
    uploading: bool = False
    progress: Progress = field(default_factory=lambda: Progress(micro_steps=0))
    cut_lines: int = 0
    """Of its log, which came too fast."""
    chunks: int = 0
    """What has arrived of its uploads is progress too: on a slow line heartbeats wait behind them."""
    expected: bool = False
    """Its end is no news: the worker said goodbye, or was told to stop."""


class CrewServer:
    """Serves one run, or with `jobs` machines that train whole runs, and those runs that some are lent to. `parameters`
    and `contribution`: see `Served`."""

    def __init__(
        self,
        *,
        keys: CoordinatorKeys,
        nodes: AllowList,
        receiver: Receiver,
        offer: Offer,
        parameters: wire.Layout,
        contribution: wire.Layout,
        ray: RayHeadServer | None = None,
        standby: StandbyServer | None = None,
        jobs: JobReceiver | None = None,
        term: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._term = term
        self._ray = ray or RayHeadServer()
        self._keys = keys
        self._nodes = nodes
        self._usual = Served(receiver=receiver, offer=offer, parameters=parameters, contribution=contribution)
        self._lent: dict[str, Served] = {}
        """By node."""
        self._standby = standby or StandbyServer()
        self._jobs = jobs
        self._invites = Invites()
        self._enrolling = threading.Lock()
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._admission = Admission()
        self._clock = clock
        self._pace = RateLimit(per_second=NEWS_PER_SECOND, at_once=NEWS_AT_ONCE)
        self._report_pace = RateLimit(per_second=REPORTS_PER_SECOND, at_once=REPORTS_AT_ONCE)
        self._job_pace = RateLimit(per_second=JOB_NEWS_PER_SECOND, at_once=JOB_NEWS_AT_ONCE)
        self._server: RunningServer | None = None
        self._gate = Gate()
        self._paused: frozenset[str] = frozenset()
        self._listed, self._left = set(nodes.nodes()), set[str]()

    # -- for the engine ------------------------------------------------------------------------------------------------

    def serve(self, listener: socket.socket) -> int:
        """Take the connections of `listener` (`gate.bind`); returns its port."""
        allow_descriptors(OTHER_DESCRIPTORS + DESCRIPTORS_OF_A_WORKER * MAX_WORKERS)
        identity, roots = self._keys.identity, self._keys.client_roots()
        self._server = start_server(self._gate.inner_address, handlers=self._handlers(), identity=identity, roots=roots)
        return self._gate.open(listener, inner_port=self._server.port)

    def listen(self, listener: socket.socket) -> None:
        """Take connections there, too: the same machine at another address."""
        self._gate.listen(listener)

    @property
    def direct_address(self) -> str:
        """What the worker processes of this machine dial."""
        return self._gate.direct_address

    def send(self, worker: str, message: ToWorker, *, of: Served | None = None) -> None:
        """Put a message on its way; a worker without a session in this run gets nothing.

        A `Version`'s parameters are copied now: the weights of record may change before the worker has read them.
        `of`: the run that it is lent to; when that ends there is other work for it.
        """
        served, name = of or self._usual, ""
        if isinstance(message, Version):
            with self._lock:
                read = {session.version for session in self._sessions.values() if session.served is served}
            name = served.publish(message, read=read)
            if served is self._usual:
                self._standby.announced = message.version
        with self._lock:
            session = self._sessions.get(worker)
            if session is None or session.served is not served:
                return
            if isinstance(message, Lease):
                session.leases.add(message.lease_id)
        if isinstance(message, Stop):
            self._end(session, message if of is None or message.refused else replace(message, again=True))
        else:
            session.version = name or session.version
            session.outbox.put(self._for_worker(message, parameters=name))

    def lend(self, nodes: Collection[str], served: Served) -> None:
        """These take part in that run until they are taken back."""
        with self._lock:
            self._lent.update(dict.fromkeys(nodes, served))
        self._call_over(nodes, reason=LENT)

    def take_back(self, served: Served) -> None:
        """Those who are lent to it do what all others do."""
        with self._lock:
            nodes = [node for node, run in self._lent.items() if run is served]
            for node in nodes:
                del self._lent[node]
        self._call_over(nodes, reason=Message("the run of several machines is over"))

    def _call_over(self, nodes: Collection[str], *, reason: str) -> None:
        with self._lock:
            sessions = [session for session in self._sessions.values() if session.node in nodes]
        for session in sessions:
            self._end(session, Stop(reason=reason, again=True))
            session.served.receiver.left(session.worker, reason)

    def present(self, served: Served) -> list[str]:
        """Who has a session in that run."""
        with self._lock:
            return sorted(session.worker for session in self._sessions.values() if session.served is served)

    def _served_to(self, node: str) -> Served:
        return self._lent.get(node, self._usual)

    def order(self, worker: str, order: Order) -> None:
        """Put an order on its way; a worker without a session gets nothing."""
        with self._lock:
            session = self._sessions.get(worker)
        if session is not None and session.served is self._usual:
            session.outbox.put(order_to_wire(order))

    def _for_worker(self, message: ToWorker, *, parameters: str) -> pb.ToWorker:
        return wire.to_worker(message, parameters=parameters, standbys=self._standby.addresses(), term=self._term)

    def adopt_invites(self, invites: Mapping[bytes, int]) -> None:
        """Let new nodes in for a while: SHA-256 of an invite's secret → for how many nodes it is good."""
        with self._enrolling:
            for secret_hash, uses in invites.items():
                self._invites.adopt(secret_hash, uses=uses, now=monotonic())

    def end_kicked(self) -> None:
        """End the sessions of nodes that the allow-list does not hold any more."""
        listed = self._nodes.nodes()
        with self._lock:
            kicked = [session for session in self._sessions.values() if session.node not in listed]
            gone = (self._listed | {session.node for session in kicked}) - set(listed)
            left, self._left, self._listed = gone & self._left, self._left - gone, set(listed)
        for name in sorted(gone - left):
            log.info("%s was kicked", name, extra=TALK)
        for session in kicked:
            has_left = session.node in left
            told = Message("this machine has left the crew") if has_left else KICKED
            self._end(session, Stop(reason=told, refused=True))
            why = Message("it has left the crew" if has_left else "it was kicked")
            session.served.receiver.left(session.worker, why)
        self._gate.forget_all_but(listed)

    def pause(self, nodes: frozenset[str]) -> None:
        """These are to wait, and no others: their sessions end, and no new ones begin."""
        with self._lock:
            begun, self._paused = nodes - self._paused, nodes
            self._standby.paused = nodes
            held = [session for session in self._sessions.values() if session.node in begun]
        for session in held:
            self._end(session, Stop(reason=PAUSED, again=True))
            session.served.receiver.reported(session.worker, NodeReport(phase="paused"))
            session.served.receiver.left(session.worker, PAUSED)

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
        if self._server is not None:
            self._server.stop(STOP_SECONDS)
            self._server = None
        self._gate.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _handlers(self) -> Any:
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Enroll": unary(reads(self._enroll, pb.EnrolRequest), response_serializer=serialize),
                "Leave": unary(reads(self._leave, pb.Nothing), response_serializer=serialize),
                "Describe": unary(reads(self._describe, pb.Nothing), response_serializer=serialize),
                "Session": stream(reads(self._session, pb.ToCoordinator), response_serializer=serialize),
                "Upload": unary(reads(self._upload, pb.Chunk), response_serializer=serialize),
                "Download": stream(reads(self._download, pb.DownloadRequest)),
                **CheckServer(caller=self._caller).handlers(),
                **self._ray.handlers(self._caller, host_of=self._gate.host_of),
                **self._standby.handlers(self._caller),
                **KeepServer(self._jobs).handlers(self._worker),
            },
        )

    def _enroll(self, requests: Iterator[pb.EnrolRequest], context: Any) -> pb.EnrolReply:
        certificate = peer_certificate(context.auth_context())
        if certificate is None or not is_enrol(certificate):
            refuse(context, "this machine is in the crew already")
        self._admission.admit_stranger(self._gate.host_of(context.peer()), context)
        cut_off(context, after=ENROL_SECONDS)
        request = only(requests, context)
        try:
            wanted, signed = self._keys.sign(request.certificate_request)
            if OWN_WORKER.fullmatch(wanted):
                told = "{name} is what workers of the coordinator's own machine are called"
                raise NameTaken(told, name=wanted, hint="another name: cuadrilla join --name NAME")
            with self._enrolling:
                self._redeem(request.secret, wanted, context)
                try:
                    name = self._nodes.add(wanted, certificate=signed, numbered=request.numbered)
                except CuadrillaError:
                    self._invites.give_back(request.secret)
                    raise
            _, signed = self._keys.sign(request.certificate_request, name=name)
        except NameTaken as error:
            log.info("a machine was not let in: %s; its invite is still good", error.message)
            refuse(context, error.message, code=grpc.StatusCode.ALREADY_EXISTS)
        except CuadrillaError as error:
            refuse(context, error.message)
        log.info("%s joined the crew", name)
        if name != wanted:
            log.info("a new machine calls itself %s, as another does: here it is %s", wanted, name, extra=TALK)
        return pb.EnrolReply(certificate=signed, ca=self._keys.identity.ca, name=name)

    def _redeem(self, secret: bytes, name: str, context: Any) -> None:
        """Use an invite up for the machine that calls itself `name`, or end its call."""
        was_open = self._invites.is_open(monotonic())
        outcome = self._invites.redeem(secret, now=monotonic())
        if outcome is Redemption.ACCEPTED:
            return
        level = logging.WARNING if was_open else logging.DEBUG  # guessing on is no news
        told = Message("a machine that calls itself {name} was not let in: {reason}", name=name, reason=outcome.value)
        log.log(level, "%s", told)
        if was_open and outcome is Redemption.WRONG and not self._invites.is_open(monotonic()):
            log.warning("all invites are closed after wrong tries; make a new one")
        refuse(context, outcome.value)

    def _leave(self, _requests: Iterator[pb.Nothing], context: Any) -> pb.Nothing:
        name = self._caller(context)
        with self._lock:
            self._left.add(name)
        try:
            self._nodes.remove(name)
        except CuadrillaError as error:
            with self._lock:
                self._left.discard(name)
            refuse(context, error.message, code=grpc.StatusCode.UNAVAILABLE)
        self._standby.forget(name)
        log.info("%s has left the crew; with an invite it may come back", name, extra=TALK)
        return pb.Nothing()

    def _describe(self, _requests: Iterator[pb.Nothing], context: Any) -> pb.Run:
        served = self._served_to(self._caller(context))
        files = [
            pb.File(path=path, sha256=sha256, num_bytes=here.stat().st_size)
            for path, (here, sha256) in served.offer.files.items()
        ]
        return pb.Run(
            config=served.offer.config,
            files=files,
            cuadrilla=__version__,
            term=self._term,
            takes_jobs=self._jobs is not None and served is self._usual,
            run=served.name,
        )

    def _session(self, requests: Iterator[pb.ToCoordinator], context: Any) -> Iterator[pb.ToWorker]:
        worker = self._worker(context)
        node, wanted = node_of(worker), dict(context.invocation_metadata()).get(RUN_KEY, "")
        with self._lock:  # a pause either finds the session, or is found; and so does who lends its node
            served = self._served_to(node)
            session = _Session(worker, context, node, served, uploads=wire.Uploads(served.contribution))
            if served.name != wanted:
                refuse(context, "there is other work for this machine", code=grpc.StatusCode.ABORTED)
            if session.node in self._paused:
                refuse(context, PAUSED, code=grpc.StatusCode.RESOURCE_EXHAUSTED)
            if not self._pace.admits(session.node, self._clock()):
                refuse(context, "this node begins too many sessions", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
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
            older.served.receiver.left(session.worker, reason)
        reader = threading.Thread(target=self._read, args=(session, requests), name=f"reads-{session.worker}")
        reader.start()
        try:
            yield from iter(session.outbox.get, None)
        finally:
            self._forget(session)

    def _read(self, session: _Session, requests: Iterator[pb.ToCoordinator]) -> None:
        """Everything one worker says, until its connection ends."""
        try:
            for request in requests:
                if request.WhichOneof("kind") == "report":
                    self._take_report(session, request.report)
                    continue
                if request.WhichOneof("kind") == "job_news":
                    self._take_news(session, request.job_news)
                    continue
                message = wire.from_worker(request, uploads=session.uploads)
                with self._lock:
                    if self._sessions.get(session.worker) is not session:
                        return
                if isinstance(message, Progress):
                    session.progress = message
                    self._tell_progress(session)
                elif not self._is_due(session, message):
                    raise LinkError("it sends far more than its work needs", hint="install the same version there")
                else:
                    if not session.joined:
                        log.info("%s joined", session.worker, extra=TALK)
                    session.joined = True
                    session.expected = session.expected or isinstance(message, Goodbye)
                    session.served.receiver.deliver(session.worker, message)
        except LinkError as error:
            log.warning("%s: %s", session.worker, error.message)
            session.reason = error.message
            session.outbox.put(wire.to_worker(Stop(reason=error.message, refused=True)))
        except grpc.RpcError:  # the connection broke
            pass
        finally:
            self._forget(session)
            session.outbox.put(None)
            cut_off(session.context, after=END_SECONDS)

    def _take_report(self, session: _Session, said: pb.Report) -> None:
        """Who sends more of them than wanted is cut short, and at last sent home. Raises LinkError."""
        now = self._clock()
        with self._lock:
            if self._sessions.get(session.worker) is not session or not session.joined or session.expected:
                return
            if not self._report_pace.admits(session.worker, now):
                session.cut_lines += len(said.lines) + said.dropped
                if not self._pace.admits(session.node, now):
                    raise LinkError("it sends far more than its work needs", hint="install the same version there")
                return
            cut, session.cut_lines = session.cut_lines, 0
        report = report_from_wire(said)
        session.served.receiver.reported(session.worker, replace(report, dropped=report.dropped + cut))

    def _take_news(self, session: _Session, said: pb.JobNews) -> None:
        """Raises LinkError."""
        with self._lock:
            if self._sessions.get(session.worker) is not session or session.expected:
                return
            due = session.joined and self._job_pace.admits(session.worker, self._clock())
        if self._jobs is None or session.served is not self._usual or not due:
            raise LinkError("it sends far more than its work needs", hint="install the same version there")
        self._jobs.news(session.worker, news_from_wire(said))

    def _is_due(self, session: _Session, message: ToCoordinator) -> bool:
        with self._lock:
            if isinstance(message, Contribution) and message.lease_id in session.leases:
                session.leases.remove(message.lease_id)
                return True
            if isinstance(message, Computed) and message.lease_id in session.leases - {session.computed}:
                session.computed = message.lease_id
                return True
            return self._pace.admits(session.node, self._clock())

    def _tell_progress(self, session: _Session) -> None:
        if session.joined and not session.expected:  # an upload may go on when its session has ended
            said = session.progress
            session.served.receiver.heard(session.worker, replace(said, micro_steps=said.micro_steps + session.chunks))

    def _end(self, session: _Session, stop: Stop) -> None:
        """From now on nothing that it says counts; it may still hear why."""
        session.expected = True
        self._forget(session)
        session.outbox.put(wire.to_worker(stop))
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
            session.served.receiver.left(session.worker, session.reason)

    def _upload(self, requests: Iterator[pb.Chunk], context: Any) -> pb.Uploaded:
        worker = self._worker(context)
        with self._lock:
            session = self._sessions.get(worker)
        if session is None:
            refuse(context, "no session", code=grpc.StatusCode.FAILED_PRECONDITION)
        with self._lock:
            busy, session.uploading = session.uploading, True
        if busy:
            refuse(context, "one upload at a time", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
        try:
            return self._assemble(session, requests)
        except LinkError as error:
            refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
        finally:
            session.uploading = False

    def _assemble(self, session: _Session, requests: Iterator[pb.Chunk]) -> pb.Uploaded:
        assembly, name, served = None, "", session.served
        for chunk in requests:
            if assembly is None:
                name, layout = chunk.name, served.contribution.part(chunk.tensors)
                assembly = wire.Assembly(layout.num_bytes, layout=layout, memory=served.upload_memory)
            assembly.add(chunk)
            session.chunks += 1
            self._tell_progress(session)
        if assembly is None or not assembly.complete:
            raise LinkError("the upload ends early", hint="the worker begins again")
        session.uploads.put(name, layout.unpack(assembly.buffer))
        return pb.Uploaded(num_bytes=assembly.received)

    def _download(self, requests: Iterator[pb.DownloadRequest], context: Any) -> Iterator[bytes]:
        """Chunks, serialized."""
        served = self._served_to(self._caller(context))
        request = only(requests, context)
        packed = served.version(request.name)
        if packed is not None:
            yield from wire.chunk_messages(
                request.name, [packed], layout=served.parameters, num_bytes=len(packed), offset=request.offset
            )
            return
        path = self._file(request.name, served)
        if path is None:
            told = Message("there is no {name} here", name=request.name[:100])
            refuse(context, told, code=grpc.StatusCode.NOT_FOUND)
        yield from map(serialize, wire.file_chunks(path, request.offset))

    def _file(self, name: str, served: Served) -> Path | None:
        """A file of the offer, or of a job, by its SHA-256 in hexadecimal."""
        for path, sha256 in served.offer.files.values():
            if hmac.compare_digest(sha256.hex().encode(), name.encode()):
                return path
        return self._jobs.file(name) if self._jobs is not None and served is self._usual else None

    def _caller(self, context: Any) -> str:
        """The name of the node that calls; ends the call if it is none of this crew's."""
        return node_of(self._worker(context))

    def _worker(self, context: Any) -> str:
        """The name of the worker that calls: of a node, or of one device of it."""
        certificate = peer_certificate(context.auth_context())
        try:
            name = self._nodes.name_of(certificate) if certificate is not None else None
        except LinkError as error:
            log.warning("%s", error.message)
            name = None
        if name is None:
            refuse(context, NOT_LISTED)
        self._gate.know(context.peer(), name)
        try:
            worker = worker_name(name, str(dict(context.invocation_metadata()).get(DEVICE_KEY, "")))
        except LinkError as error:
            refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
        self._admission.admit(worker, context)
        return worker
