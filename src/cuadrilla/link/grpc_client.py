"""A worker's side of the crew link: it dials one port, and listens on nothing.

`Connection` is one TLS connection of a node; `GrpcLink` is a session on it and the `Link` that the training loop uses.
A session that breaks stays broken: every method raises LinkError, and the caller begins a new one with a new Hello.
"""

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import (
    COME_AGAIN,
    PAUSED,
    Busy,
    Contribution,
    Goodbye,
    KnownTerm,
    NodeReport,
    Paused,
    Progress,
    Refused,
    Stop,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
)
from cuadrilla.link.grpc_calls import DEVICE_KEY, RUN_KEY
from cuadrilla.link.inbox import Inbox
from cuadrilla.link.invite import check_node_name
from cuadrilla.link.jobs import JobNews, Order, files_from_wire, named_chunks, news_to_wire, order_from_wire
from cuadrilla.link.liveness import Liveness
from cuadrilla.link.names import JOB_NAME
from cuadrilla.link.offer import OfferedFile, RunDescription, keep_file
from cuadrilla.link.reports import report_to_wire
from cuadrilla.link.tls import SERVER_NAME, UPDATE, Identity
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

HEARTBEAT_SECONDS = 1.0
CALL_SECONDS = 10.0
FAREWELL_SECONDS = 2.0  # the coordinator ends a session one second after its last word
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS = 10.0, 15.0
"""A transfer would else take a quarter of an hour (Linux: tcp_retries2) to notice that a router has forgotten its
connection, or that its own address has changed; between transfers `Liveness` is quicker."""
TRANSFER_SECONDS = 600.0
"""A transfer that takes longer is given up: the session's own silence is noticed much earlier."""
PIECE_BYTES = 64 * 2**20
"""A large file is asked for in pieces, each of which must arrive in that time."""
MAX_ORDERS = 16
"""Of a coordinator, that wait: it gives the next one when it knows how the last one went."""
MEASURE_SECONDS = 40.0
"""A measurement of bandwidth: longer than the coordinator lets one take."""
SERVICE = f"/{pb.DESCRIPTOR.services_by_name['Crew'].full_name}/"


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """A node's name in the crew, its certificate, and that of the crew's CA."""

    name: str
    certificate: bytes
    ca: bytes


class Connection:
    """A node's connection to the coordinator at `address` (HOST:PORT).

    `device`: for which of its devices it calls, where it has a worker for each; "" where it has one.
    """

    def __init__(self, address: str, *, identity: Identity, term: KnownTerm | None = None, device: str = "") -> None:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=identity.ca, private_key=identity.key, certificate_chain=identity.certificate
        )
        options = [
            ("grpc.ssl_target_name_override", SERVER_NAME),
            ("grpc.max_receive_message_length", 16 * wire.CHUNK_BYTES),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),  # a crew is on one's own network; proxies are for the web
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, also to an address of another crew
            ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_SECONDS)),
            ("grpc.keepalive_timeout_ms", int(1000 * KEEPALIVE_TIMEOUT_SECONDS)),
        ]
        self._address = address
        self.identity = identity
        self._term = term or KnownTerm()
        self._memory = wire.Memory(keep=1)
        self._device = device
        self._metadata = ((DEVICE_KEY, device),) if device else ()
        self._run = ""
        """What this node was told to take part in."""
        self._channel = grpc.secure_channel(address, credentials, options=options)

    def enroll(self, *, secret: bytes, request: bytes, numbered: bool = False) -> Enrolled:
        """Trade an invite's secret for a certificate. Raises LinkError.

        `numbered`: if the name in the request is another machine's, it with a number behind it will do.
        """
        message = pb.EnrolRequest(secret=secret, certificate_request=request, numbered=numbered)
        reply = self._unary("Enroll", message, pb.EnrolReply)
        check_node_name(reply.name)
        return Enrolled(name=reply.name, certificate=reply.certificate, ca=reply.ca)

    def leave(self) -> None:
        """This node's name is free again, and its key opens nothing more. Raises LinkError."""
        self._unary("Leave", pb.Nothing(), pb.Nothing)

    def describe(self) -> RunDescription:
        """Raises LinkError, also for a coordinator of an earlier term."""
        run = self._unary("Describe", pb.Nothing(), pb.Run)
        files = files_from_wire(run.files)
        self.meet(run.term)
        version = one_line(run.cuadrilla, most=wire.MAX_TEXT)
        self._run = run.run if JOB_NAME.fullmatch(run.run) else ""
        return RunDescription(
            config=run.config, files=files, cuadrilla=version, takes_jobs=run.takes_jobs, run=self._run
        )

    def meet(self, term: int) -> None:
        """Raises LinkError for a coordinator of an earlier term."""
        self._term.meet(term, address=self._address)

    def fetch(self, file: OfferedFile, *, to: Path) -> None:
        """Download a file and check its hash; a broken download goes on where it stopped. Raises LinkError."""
        keep_file(file, to=to, read=lambda offset: self._blocks(file, offset))

    def _blocks(self, file: OfferedFile, offset: int) -> Iterator[bytes]:
        assembly = wire.Download(file.num_bytes, received=offset)
        with self._errors():
            for chunk in self._stream(file.sha256.hex(), offset):
                yield assembly.checked(chunk)

    def clock(self) -> float:
        """The coordinator's wall clock, in seconds since 1970. Raises LinkError."""
        seconds: float = self._unary("Check", pb.Nothing(), pb.CheckReply).unix_seconds
        return seconds

    def answers(self, seconds: float) -> bool:
        """Whether the coordinator says anything on this connection within these seconds."""
        try:
            self._unary("Check", pb.Nothing(), pb.CheckReply, seconds=seconds)
        except LinkError as error:
            return isinstance(error, Refused | Busy)
        return True

    def answers_anew(self, seconds: float) -> bool:
        """Whether it does on a new one."""
        with closing(Connection(self._address, identity=self.identity, device=self._device)) as another:
            return another.answers(seconds)

    def ray_head(self, node: pb.RayNode) -> pb.RayHead:
        """Address and token of the run's Ray head for this node, or why it gets none. Raises LinkError."""
        head: pb.RayHead = self._unary("RayHead", node, pb.RayHead)
        head.refusal = one_line(head.refusal, most=wire.MAX_REASON)
        return head

    def receive_for(self, seconds: float) -> int:
        """Bytes that come from the coordinator in these seconds. Raises LinkError."""
        call = self._channel.unary_stream(
            SERVICE + "Receive", request_serializer=_serialize, response_deserializer=pb.Chunk.FromString
        )
        with self._errors():
            chunks = call(pb.ReceiveRequest(seconds=seconds), timeout=MEASURE_SECONDS)
            return sum(len(chunk.data) for chunk in chunks)

    def send_for(self, seconds: float, chunk: pb.Chunk) -> int:
        """Bytes that reach the coordinator in these seconds, in copies of `chunk`. Raises LinkError."""
        call = self._channel.stream_unary(
            SERVICE + "Send", request_serializer=_serialize, response_deserializer=pb.Uploaded.FromString
        )
        end = time.monotonic() + seconds
        copies = itertools.takewhile(lambda _: time.monotonic() < end, itertools.repeat(chunk))
        with self._errors():
            num_bytes: int = call(copies, timeout=MEASURE_SECONDS).num_bytes
        return num_bytes

    def average(self, tensors: Tensors, *, layout: wire.Layout) -> Tensors:
        """The mean of `tensors` and those that the coordinator knows; at most a chunk of both. Raises LinkError."""
        assembly = wire.Assembly(layout.num_bytes, layout=layout)
        request = next(wire.chunks("mine", layout.pack(tensors), layout=layout))
        assembly.add(self._unary("Average", request, pb.Chunk))
        if not assembly.complete:
            raise LinkError("the coordinator's tensors are incomplete", hint="try again")
        return layout.unpack(assembly.buffer)

    def crew_keys(self) -> dict[str, bytes]:
        """The coordinator's own keys, for a standby, by file name. Raises LinkError."""
        return dict(self._unary("Keys", pb.Nothing(), pb.CrewKeys).files)

    def growth(self, address: str) -> pb.Grown:
        """What a standby, which would coordinate at `address`, may copy by now. Raises LinkError."""
        grown: pb.Grown = self._unary("Growth", pb.Following(address=address), pb.Grown)
        return grown

    def copy(self, path: str, *, offset: int, end: int) -> Iterator[bytes]:
        """A part of a file that has grown. Raises LinkError, also when it is shorter."""
        call = self._channel.unary_stream(
            SERVICE + "Copy", request_serializer=_serialize, response_deserializer=pb.Chunk.FromString
        )
        for start in range(offset, end, PIECE_BYTES):
            part = wire.Download(min(start + PIECE_BYTES, end), received=start)
            request = pb.CopyRequest(path=path, offset=start, end=part.num_bytes)
            with self._errors():
                for chunk in call(request, timeout=TRANSFER_SECONDS):
                    yield part.checked(chunk)
            if part.received < part.num_bytes:
                raise LinkError("{path} ended early", path=path, hint="the coordinator is asked again")

    def keep(self, name: str, path: Path) -> None:
        """Send a file under a name of its own. Raises LinkError."""
        call = self._channel.stream_unary(
            SERVICE + "Keep", request_serializer=_serialize, response_deserializer=pb.Uploaded.FromString
        )
        with self._errors():
            call(named_chunks(name, path), timeout=TRANSFER_SECONDS, metadata=self._metadata)

    def session(self, *, parameters: wire.Layout) -> "GrpcLink":
        """A new session; `parameters` is what a version of this run's model looks like."""
        return GrpcLink(self, parameters=parameters)

    def close(self) -> None:
        self._channel.close()

    # -- for GrpcLink --------------------------------------------------------------------------------------------------

    def open_session(self, outgoing: Iterator[pb.ToCoordinator]) -> Any:
        call = self._channel.stream_stream(
            SERVICE + "Session", request_serializer=_serialize, response_deserializer=pb.ToWorker.FromString
        )
        return call(outgoing, metadata=(*self._metadata, (RUN_KEY, self._run)))

    def upload(self, name: str, tensors: Tensors) -> None:
        layout = wire.Layout.of(tensors)
        call = self._channel.stream_unary(SERVICE + "Upload", response_deserializer=pb.Uploaded.FromString)
        messages = wire.chunk_messages(name, layout.parts(tensors), layout=layout, num_bytes=layout.num_bytes)
        with self._errors():
            call(messages, timeout=TRANSFER_SECONDS, metadata=self._metadata)

    def download(self, name: str, layout: wire.Layout) -> Tensors:
        assembly = wire.Assembly(layout.num_bytes, layout=layout, memory=self._memory)
        with self._errors():
            for chunk in self._stream(name, 0):
                assembly.add(chunk)
        if not assembly.complete:
            raise LinkError("{path} ended early", path=name, hint="the coordinator is asked again")
        return layout.unpack(assembly.buffer)

    def _stream(self, name: str, offset: int) -> Any:
        call = self._channel.unary_stream(
            SERVICE + "Download", request_serializer=_serialize, response_deserializer=pb.Chunk.FromString
        )
        request = pb.DownloadRequest(name=name, offset=offset)
        return call(request, timeout=TRANSFER_SECONDS, metadata=self._metadata)

    def _unary(self, method: str, message: Any, reply: Any, *, seconds: float = CALL_SECONDS) -> Any:
        call = self._channel.unary_unary(
            SERVICE + method, request_serializer=_serialize, response_deserializer=reply.FromString
        )
        with self._errors():
            return call(message, timeout=seconds, metadata=self._metadata)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise as_link_error(error, address=self._address) from None


class GrpcLink:
    """A session: a `Link`. Heartbeats go out by themselves."""

    def __init__(self, connection: Connection, *, parameters: wire.Layout) -> None:
        self._connection = connection
        self._parameters = parameters
        self._outgoing: queue.SimpleQueue[pb.ToCoordinator | None] = queue.SimpleQueue()
        self._inbox = Inbox()
        self._orders: queue.Queue[Order] = queue.Queue(MAX_ORDERS)
        self._progress = Progress(micro_steps=0)
        self._transfers: set[str] = set()
        self._broken: LinkError | None = None
        self.heard_at = 0.0
        """When the coordinator last said something, in monotonic seconds; 0 for never."""
        self.standbys: tuple[str, ...] = ()
        """Where the crew would go on without this coordinator."""
        self._responses = connection.open_session(self._messages())
        self._reader = threading.Thread(target=self._read, name="reads-coordinator", daemon=True)
        self._reader.start()
        self._liveness = Liveness(
            asks=connection.answers,
            asks_anew=connection.answers_anew,
            busy=lambda: bool(self._transfers),
            dead=self._found_dead,
        )

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Goodbye):  # the coordinator may have hung up already: that is no error
            self._outgoing.put(wire.to_coordinator(message))
            self._outgoing.put(None)
            return
        self._check()
        if isinstance(message, Progress):
            self._progress = message  # goes with the next heartbeat
        else:
            upload = ""
            if isinstance(message, Contribution):
                upload = wire.upload_name(message.lease_id)
                if message.tensors:
                    self._upload(message.tensors, name=upload)
            self._outgoing.put(wire.to_coordinator(message, upload=upload))

    def report(self, report: NodeReport) -> None:
        self._check()
        self._outgoing.put(pb.ToCoordinator(report=report_to_wire(report)))

    def tell(self, news: JobNews) -> None:
        """How it goes on with a job. Raises LinkError when the session has broken."""
        self._check()
        self._outgoing.put(news_to_wire(news))

    def keep(self, name: str, path: Path) -> None:
        """Send a file of a job's run, by the name of the job and its own in the run. Raises LinkError."""
        self._check()
        with self._transfer(name):
            self._connection.keep(name, path)

    def next_order(self, *, timeout_seconds: float) -> Order | None:
        """What to do next, if something comes in time."""
        with suppress(queue.Empty):
            return self._orders.get(timeout=timeout_seconds)
        return None

    def round_trip(self) -> float | None:
        if self._transfers:
            return None
        began = time.perf_counter()
        self._connection.clock()
        return time.perf_counter() - began

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        self._check()
        self._upload(piece, name=wire.upload_name(lease_id))

    def next_event(self) -> ToWorker:
        return self._inbox.next_event()

    def interrupted(self) -> bool:
        return self._inbox.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        self._check()
        with self._transfer(str(ref)):
            return self._connection.download(str(ref), self._parameters)

    def hold(self, reason: str) -> None:
        self._inbox.put(Stop(reason=reason, again=True))

    def farewell(self) -> Stop | None:
        """The Stop with which the coordinator ended this session, if it did: what failed after it does not matter."""
        self._reader.join(timeout=FAREWELL_SECONDS)
        return self._inbox.farewell()

    def close(self) -> None:
        self._liveness.close()
        self._outgoing.put(None)
        self._reader.join(timeout=CALL_SECONDS)
        self._responses.cancel()
        self._reader.join()

    def _upload(self, tensors: Tensors, *, name: str) -> None:
        with self._transfer(name):
            self._connection.upload(name, tensors)

    def _messages(self) -> Iterator[pb.ToCoordinator]:
        """What goes out: messages as they come, and a heartbeat when there has been none for a second."""
        while True:
            try:
                message = self._outgoing.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                message = wire.to_coordinator(self._progress)
            if message is None:
                return
            yield message

    def _read(self) -> None:
        problem = LinkError("the coordinator ended the session", hint="it is asked again")
        try:
            for received in self._responses:
                if received.HasField("version"):
                    self._connection.meet(received.version.term)
                    self.standbys = tuple(one_line(place, most=wire.MAX_TEXT) for place in received.version.standbys)
                self.heard_at = time.monotonic()
                if (order := order_from_wire(received)) is not None:
                    self._take_order(order)
                    continue
                self._inbox.put(wire.from_coordinator(received))
        except grpc.RpcError as error:
            problem = as_link_error(error, address=Message("the coordinator"))
        except LinkError as error:
            problem = error
        self._break(problem)

    def _take_order(self, order: Order) -> None:
        """Raises LinkError for one that nobody can follow any more."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            told = "the coordinator gives more orders than anybody could follow"
            raise LinkError(told, hint="it is asked again") from None

    def _found_dead(self) -> None:
        self._break(LinkError("the connection is dead: the coordinator answers on another", hint="it joins again"))
        self._responses.cancel()

    def _break(self, problem: LinkError) -> None:
        self._broken = self._broken or problem
        self._inbox.put(problem)

    @contextmanager
    def _transfer(self, name: str) -> Iterator[None]:
        self._transfers.add(name)
        try:
            yield
        finally:
            self._transfers.discard(name)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken


def as_link_error(error: grpc.RpcError, *, address: str) -> LinkError:
    """What a failed call means for a person."""
    code = error.code() if isinstance(error, grpc.Call) else None
    # Whoever answers writes them: the coordinator, but also what else listens at that address.
    said = one_line((error.details() if isinstance(error, grpc.Call) else None) or str(error), most=wire.MAX_REASON)
    reason = Message(said)  # a whole sentence of ours has its translation here
    match code:
        case grpc.StatusCode.PERMISSION_DENIED:
            return Refused("the coordinator refused: {reason}", reason=reason, hint=COME_AGAIN)
        case grpc.StatusCode.ALREADY_EXISTS:
            return Refused(
                "the coordinator refused: {reason}",
                reason=reason,
                hint="the invite is still good, for a free name or this machine's own: cuadrilla join --name NAME",
            )
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            hint = "is the coordinator running?"
            return LinkError("{address} cannot be reached: {reason}", address=address, reason=reason, hint=hint)
        case grpc.StatusCode.ABORTED:
            return LinkError("{reason}", reason=reason, hint="it asks again")
        case grpc.StatusCode.UNIMPLEMENTED:
            problem = "{address} does not know this call: {reason}"
            return LinkError(problem, address=address, reason=reason, hint=UPDATE)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if said == PAUSED:
            return Paused("the coordinator has paused this machine", hint="cuadrilla unpause NAME, there")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            hint = "try again in half a minute"
            return Busy("{address} is busy: {reason}", address=address, reason=reason, hint=hint)
        case _:
            hint = "see the coordinator's log"
            return LinkError("{address} answered with an error: {reason}", address=address, reason=reason, hint=hint)


def _serialize(message: Any) -> bytes:
    raw: bytes = message.SerializeToString()
    return raw
