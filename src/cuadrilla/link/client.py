"""A worker's side of the crew link: it dials one port, and listens on nothing.

`Connection` is one TLS connection of a node; `GrpcLink` is a session on it and the `Link` that the training loop uses.
A session that breaks stays broken: every method raises LinkError, and the caller begins a new one with a new Hello.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import (
    COME_AGAIN,
    MAX_REASON,
    PAUSED,
    Busy,
    Clock,
    Contribution,
    Download,
    Enroll,
    Enrolled,
    FilePart,
    Follow,
    Goodbye,
    KnownTerm,
    Lease,
    Measure,
    NodeReport,
    Nothing,
    Paused,
    Progress,
    Refused,
    Stop,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.link.calls import DEVICE_KEY, INVITE_KEY, SERVICE, TOKEN_KEY
from cuadrilla.link.identity import SERVER_NAME, UPDATE, Identity
from cuadrilla.link.inproc import Inbox
from cuadrilla.link.invite import check_node_name
from cuadrilla.link.jobs import Assignment, JobNews, Keep, Order, Recall
from cuadrilla.link.offer import OfferedFile, RunDescription, keep_file
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

T = TypeVar("T")
HEARTBEAT_SECONDS = 1.0
CALL_SECONDS = 10.0
FAREWELL_SECONDS = 2.0  # the coordinator ends a session one second after its last word
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS = 10.0, 15.0
"""A transfer would else take a quarter of an hour (Linux: tcp_retries2) to notice that a router has forgotten its
connection, or that its own address has changed; between transfers `GrpcLink` is quicker."""
MAX_ORDERS = 16
"""Of a coordinator, that wait: it gives the next one when it knows how the last one went."""
ASK_EVERY_SECONDS, ANSWER_SECONDS = 2.0, 2.0
SILENT_SECONDS = 6.0
"""By then the coordinator has given the worker's work to others, unless its run waits longer than usual."""
MEASURE_SECONDS = 40.0
"""A measurement of bandwidth: longer than the coordinator lets one take."""
ORDERS = (Assignment, Recall)
TOLD = (Version, Lease, Stop, *ORDERS)
"""What a coordinator says in a session."""


class Connection:
    """A node's connection to the coordinator at `address` (HOST:PORT).

    `device`: for which of its devices it calls, where it has a worker for each; "" where it has one.
    """

    def __init__(self, address: str, *, identity: Identity, term: KnownTerm | None = None, device: str = "") -> None:
        credentials = grpc.ssl_channel_credentials(root_certificates=identity.certificate)
        options = [
            ("grpc.ssl_target_name_override", SERVER_NAME),
            ("grpc.max_receive_message_length", 16 * wire.CHUNK_BYTES),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),  # a crew is on one's own network; proxies are for the web
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, also to an address of another crew
            ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_SECONDS)),
            ("grpc.keepalive_timeout_ms", int(1000 * KEEPALIVE_TIMEOUT_SECONDS)),
            ("grpc.http2.max_pings_without_data", 0),  # a standby only listens
        ]
        self._address = address
        self.identity = identity
        self._term = term or KnownTerm()
        self._memory = wire.Memory(keep=1)
        self._device = device
        device_named = ((DEVICE_KEY, device),) if device else ()
        self._metadata = (*(((TOKEN_KEY, identity.token),) if identity.token else ()), *device_named)
        self._channel = grpc.secure_channel(address, credentials, options=options)

    def enroll(self, name: str, *, secret: bytes, numbered: bool = False) -> tuple[str, str]:
        """Trade an invite's secret for the name under which this machine is in the crew, and its token.

        `numbered`: if that name is another machine's, it with a number behind it will do. Raises LinkError.
        """
        reply = self._unary("Enroll", Enroll(name=name, numbered=numbered), Enrolled, also=(INVITE_KEY, secret))
        check_node_name(reply.name)
        return reply.name, reply.token

    def leave(self) -> None:
        """This node's name is free again, and its key opens nothing more. Raises LinkError."""
        self._unary("Leave", Nothing(), Nothing)

    def describe(self) -> RunDescription:
        """Raises LinkError, also for a coordinator of an earlier term."""
        run = self._unary("Describe", Nothing(), RunDescription)
        self.meet(run.term)
        return run

    def meet(self, term: int) -> None:
        """Raises LinkError for a coordinator of an earlier term."""
        self._term.meet(term, address=self._address)

    def fetch(self, file: OfferedFile, *, to: Path, arrived: Callable[[int], None] = lambda _: None) -> None:
        """Download a file and check its hash; a broken download goes on where it stopped. Raises LinkError."""
        keep_file(file, to=to, read=lambda offset: self._blocks(file, offset), arrived=arrived)

    def _blocks(self, file: OfferedFile, offset: int) -> Iterator[bytes]:
        arriving = wire.Arriving(file.num_bytes, received=offset)
        with self._errors():
            for chunk in self._download(Download(sha256=file.sha256.hex(), offset=offset)):
                yield arriving.checked(chunk)

    def clock(self) -> float:
        """The coordinator's wall clock, in seconds since 1970. Raises LinkError."""
        return self._unary("Check", Nothing(), Clock).unix_seconds

    def answers(self, seconds: float) -> bool:
        """Whether the coordinator says anything on this connection within these seconds."""
        try:
            self._unary("Check", Nothing(), Clock, seconds=seconds)
        except LinkError as error:
            return isinstance(error, Refused | Busy)
        return True

    def answers_anew(self, seconds: float) -> bool:
        """Whether it does on a new one."""
        with closing(Connection(self._address, identity=self.identity, device=self._device)) as another:
            return another.answers(seconds)

    def receive_for(self, seconds: float) -> int:
        """Bytes that come from the coordinator in these seconds. Raises LinkError."""
        call = self._call("unary_stream", "Receive")
        with self._errors():
            return sum(map(len, call(Measure(seconds=seconds), timeout=MEASURE_SECONDS)))

    def send_for(self, seconds: float, chunk: bytes) -> int:
        """Bytes that reach the coordinator in these seconds, in copies of `chunk`. Raises LinkError."""
        call = self._call("stream_unary", "Check")
        end = time.monotonic() + seconds
        copies = itertools.takewhile(lambda _: time.monotonic() < end, itertools.repeat(chunk))
        with self._errors():
            clock: Clock = wire.decode(call(copies, timeout=MEASURE_SECONDS), Clock)
        return clock.num_bytes

    def follow(self, address: str, *, manifest: bytes) -> Iterator[tuple[str, bytes, int]]:
        """What a standby copies, as it grows: the path of a file, its next bytes, and how many it has by now.

        `address`: where it would coordinate; `manifest`: that of its newest checkpoint. Raises LinkError at the end.
        """
        arriving = self._call("unary_stream", "Follow")(Follow(address=address, manifest=manifest))
        with self._errors():
            for head, data in zip(arriving, arriving, strict=False):  # by turns
                part = wire.decode(head, FilePart)
                yield part.name, data, part.num_bytes
        raise LinkError("the coordinator ended the session", hint="it is asked again")

    def keep(self, name: str, path: Path) -> None:
        """Send a file under a name of its own. Raises LinkError."""
        self._send("Keep", Keep(name=name, num_bytes=path.stat().st_size), wire.file_chunks(path))

    def session(self, *, parameters: wire.Layout) -> "GrpcLink":
        """A new session; `parameters` is what a version of this run's model looks like."""
        return GrpcLink(self, parameters=parameters)

    def close(self) -> None:
        self._channel.close()

    # -- for GrpcLink --------------------------------------------------------------------------------------------------

    def open_session(self, outgoing: Iterator[object]) -> Any:
        return self._call("stream_stream", "Session")(outgoing)

    def upload(self, contribution: Contribution) -> None:
        """Raises LinkError."""
        layout = wire.Layout.of(contribution.tensors)
        parts = layout.parts(contribution.tensors) if contribution.valid else ()
        self._send("Upload", contribution, wire.chunks(parts))

    def version(self, number: int, *, num_bytes: int, check: Callable[[], None]) -> memoryview:
        """The blob of a version. `check` is called with each chunk. Raises LinkError."""
        arriving = wire.Assembly(num_bytes, memory=self._memory)
        with self._errors():
            for chunk in self._download(Download(version=number)):
                check()
                arriving.add(chunk)
        arriving.check_complete()
        return arriving.blob

    def _download(self, wanted: Download) -> Any:
        return self._call("unary_stream", "Download")(wanted)

    def _send(self, method: str, head: object, chunks: Iterable[bytes]) -> None:
        with self._errors():
            self._call("stream_unary", method)(itertools.chain([head], chunks))

    def _unary(
        self,
        method: str,
        message: object,
        reply: type[T],
        *,
        seconds: float = CALL_SECONDS,
        also: tuple[str, bytes] | None = None,
    ) -> T:
        call = self._call("unary_unary", method, *([also] if also else []))
        with self._errors():
            found: T = wire.decode(call(message, timeout=seconds), reply)
        return found

    def _call(self, kind: str, method: str, *also: tuple[str, bytes]) -> Any:
        """A method of the coordinator, to be called with what is sent and a `timeout`. `kind`: as gRPC names it."""
        call = getattr(self._channel, kind)(f"/{SERVICE}/{method}", request_serializer=_serialize)
        return partial(call, metadata=(*self._metadata, *also))

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
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._inbox = Inbox()
        self._orders: queue.Queue[Order] = queue.Queue(MAX_ORDERS)
        self._progress = Progress(micro_steps=0)
        self._transferring = False
        self._broken: LinkError | None = None
        self.heard_at = 0.0
        """When the coordinator last said something, in monotonic seconds; 0 for never."""
        self.standbys: tuple[str, ...] = ()
        """Where the crew would go on without this coordinator."""
        self._responses = connection.open_session(self._messages())
        self._reader = threading.Thread(target=self._read, name="reads-coordinator", daemon=True)
        self._reader.start()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="asks-coordinator", daemon=True)
        self._watcher.start()

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Goodbye):  # the coordinator may have hung up already: that is no error
            self._outgoing.put(message)
            self._outgoing.put(None)
            return
        self._check()
        match message:
            case Progress():
                self._progress = message  # goes with the next heartbeat
            case Contribution():
                with self._transfer():
                    self._connection.upload(message)
                self._progress = replace(self._progress, part=0.0)
            case _:
                self._outgoing.put(message)

    def report(self, report: NodeReport) -> None:
        """Tell how this machine is. From any thread; raises LinkError when the session has broken."""
        self._check()
        self._outgoing.put(report)

    def tell(self, news: JobNews) -> None:
        """How it goes on with a job. Raises LinkError when the session has broken."""
        self._check()
        self._outgoing.put(news)

    def keep(self, name: str, path: Path) -> None:
        """Send a file of a job's run, by the name of the job and its own in the run. Raises LinkError."""
        self._check()
        with self._transfer():
            self._connection.keep(name, path)

    def next_order(self, *, timeout_seconds: float) -> Order | None:
        """What to do next, if something comes in time."""
        with suppress(queue.Empty):
            return self._orders.get(timeout=timeout_seconds)
        return None

    def round_trip(self) -> float | None:
        """Seconds of a question and its answer just now; None while something else travels. Raises LinkError."""
        if self._transferring:
            return None
        began = time.perf_counter()
        self._connection.clock()
        return time.perf_counter() - began

    def next_event(self) -> ToWorker:
        return self._inbox.next_event()

    def interrupted(self) -> bool:
        return self._inbox.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        self._check()
        assert isinstance(ref, int)
        with self._transfer():
            blob = self._connection.version(ref, num_bytes=self._parameters.num_bytes, check=self._check)
        return self._parameters.unpack(blob)

    def hold(self, reason: str) -> None:
        """Leave the session in order at the next moment, as if its coordinator had said so. From any thread."""
        self._inbox.put(Stop(reason=reason, again=True))

    def farewell(self) -> Stop | None:
        """The Stop with which the coordinator ended this session, if it did: what failed after it does not matter."""
        self._reader.join(timeout=FAREWELL_SECONDS)
        return self._inbox.farewell()

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()
        self._outgoing.put(None)
        self._reader.join(timeout=CALL_SECONDS)
        self._responses.cancel()
        self._reader.join()

    def _messages(self) -> Iterator[object]:
        """What goes out: messages as they come, and a heartbeat when there has been none for a second."""
        while True:
            try:
                message = self._outgoing.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                message = self._progress
            if message is None:
                return
            yield message

    def _read(self) -> None:
        problem = LinkError("the coordinator ended the session", hint="it is asked again")
        try:
            for raw in self._responses:
                message: ToWorker | Order = wire.decode(raw, *TOLD)
                self.heard_at = time.monotonic()
                match message:
                    case Version():
                        self._connection.meet(message.term)
                        self.standbys = message.standbys
                        self._inbox.put(replace(message, parameters=message.version))
                    case Lease() | Stop():
                        self._inbox.put(message)
                    case _:
                        self._take_order(message)
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

    def _watch(self) -> None:
        """Ask whether the connection lives: a router may have forgotten it, this machine may have another address.

        TCP finds that much later than the coordinator misses its worker. During a transfer nothing is asked, since an
        answer may wait behind it.
        """
        answered = time.monotonic()
        while not self._closed.wait(ASK_EVERY_SECONDS):
            if self._transferring or self._connection.answers(ANSWER_SECONDS):
                answered = time.monotonic()
            elif time.monotonic() - answered >= SILENT_SECONDS and self._is_dead():
                told = "the connection is dead: the coordinator answers on another"
                self._break(LinkError(told, hint="it joins again"))
                self._responses.cancel()
                return

    def _is_dead(self) -> bool:
        """A coordinator that only has no time answers on a new connection neither."""
        there = self._connection.answers_anew(ANSWER_SECONDS)
        busy = self._transferring or self._closed.is_set()
        return there and not busy and not self._connection.answers(ANSWER_SECONDS)

    def _break(self, problem: LinkError) -> None:
        self._broken = self._broken or problem
        self._inbox.put(problem)

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        self._transferring = True
        try:
            yield
        finally:
            self._transferring = False

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken


def as_link_error(error: grpc.RpcError, *, address: str) -> LinkError:
    """What a failed call means for a person."""
    code = error.code() if isinstance(error, grpc.Call) else None
    # Whoever answers writes them: the coordinator, but also what else listens at that address.
    said = one_line((error.details() if isinstance(error, grpc.Call) else None) or str(error), most=MAX_REASON)
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
            return Paused("the coordinator has paused this machine", hint="cuadrilla pause NAME --off, there")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            hint = "try again in half a minute"
            return Busy("{address} is busy: {reason}", address=address, reason=reason, hint=hint)
        case _:
            hint = "see the coordinator's log"
            return LinkError("{address} answered with an error: {reason}", address=address, reason=reason, hint=hint)


def _serialize(message: Any) -> bytes:
    return message if isinstance(message, bytes) else wire.encode(message)
