"""A worker's side of the crew link. It dials the coordinator's port, and listens on none.

`Connection` is one TLS connection of a node. `GrpcLink` is a session on it, and the `Link` that the training loop uses.
A broken session stays broken: every method raises LinkError, and the caller begins a new session with a new Hello.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import (
    COME_AGAIN,
    MAX_TEXT,
    Check,
    Contribution,
    Describe,
    Download,
    Enroll,
    Enrolled,
    Goodbye,
    Hello,
    Lease,
    Leave,
    NodeReport,
    OfferedFile,
    Progress,
    Refused,
    RunDescription,
    Stop,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.link.identity import SERVER_NAME, Identity
from cuadrilla.link.inproc import Inbox
from cuadrilla.link.jobs import Assignment, JobNews, Order, Recall
from cuadrilla.messages import OF_THE_SYSTEM, Message
from cuadrilla.printable import one_line
from cuadrilla.rundir import file_sha256, fsync_folder, storage_errors

T = TypeVar("T")
HEARTBEAT_SECONDS = 1.0
CALL_SECONDS = 10.0
FAREWELL_SECONDS = 2.0
MEASURE_SECONDS = 40.0
BROKE = Message("the connection broke")
BROKEN = ("Stream removed", "Socket closed", "recvmsg:", "GOAWAY")
"""What gRPC says of it."""
NOTHING_YET = Progress(micro_steps=0)
FROM_COORDINATOR = (Version, Lease, Stop, Assignment, Recall)
"""The messages of a coordinator in a session."""


class Connection:
    """A node's connection to the coordinator at `address` (HOST:PORT).

    `device`: the device whose worker calls, if the node has a worker for each of several; else "".
    """

    def __init__(self, address: str, *, identity: Identity, device: str = "") -> None:
        credentials = grpc.ssl_channel_credentials(root_certificates=identity.certificate)
        options = [
            ("grpc.ssl_target_name_override", SERVER_NAME),
            ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),  # a crew is on the user's own network; proxies are for the web
            ("grpc.use_local_subchannel_pool", 1),  # share no connection, even if another crew has this address
            *wire.PINGS,
            ("grpc.http2.max_pings_without_data", 0),  # a worker that loads its data only listens
        ]
        self.address = address
        self.identity = identity
        self.memory = wire.Memory(keep=1)
        self._device = device
        self._channel = grpc.secure_channel(address, credentials, options=options)

    def enroll(self, name: str, *, secret: bytes) -> tuple[str, str]:
        """Trade an invite's secret for this machine's name in the crew, and its token. Raises LinkError."""
        answer = self.reply(Enroll(name=name), Enrolled, secret=secret)
        return answer.name, answer.token

    def leave(self) -> None:
        """Leave the crew: the node's name is free again, and its token becomes invalid. Raises LinkError."""
        list(self.ask(Leave(), seconds=CALL_SECONDS))

    def describe(self) -> RunDescription:
        """What the coordinator trains. Raises LinkError."""
        return self.reply(Describe(), RunDescription)

    def fetch(self, file: OfferedFile, *, to: Path, arrived: Callable[[int], None] = lambda _: None) -> None:
        """Download a file and check its hash. A broken download is resumed. `arrived` is called with numbers of bytes.

        Raises LinkError, ResourceError; Refused if another try would not help.
        """
        part = to.with_name(f".{to.name}.part")
        with storage_errors(to), open(part, "ab") as target:
            begun = target.tell()
            arrived(begun)
            for data in self.ask(Download(path=file.path, offset=begun)):
                target.write(data)
                arrived(len(data))
        if file_sha256(part) != file.sha256:
            part.unlink()
            template = "{path} arrived damaged, or it has changed since the coordinator began the run"
            if begun:  # the resumed part may be that of another file
                raise LinkError(template, path=file.path, hint="try again")
            raise Refused(template, path=file.path, hint="stop the run where it is coordinated, and start it again")
        part.replace(to)
        fsync_folder(to.parent)

    def check(self) -> None:
        """Raises LinkError unless the coordinator answers within `CALL_SECONDS`."""
        list(self.ask(Check(), seconds=CALL_SECONDS))

    def receive_for(self, seconds: float) -> int:
        """The number of bytes that the coordinator sends in these seconds. Raises LinkError."""
        return sum(map(len, self.ask(Check(seconds=seconds), seconds=MEASURE_SECONDS)))

    def send_for(self, seconds: float) -> int:
        """The number of bytes that are sent in these seconds, and then reach the coordinator. Raises LinkError."""
        sent, data = itertools.tee(wire.noise(seconds))
        list(self.ask(Check(), data, seconds=MEASURE_SECONDS))
        return sum(map(len, sent))

    def session(self, *, parameters: Sequence[wire.Layout]) -> "GrpcLink":
        """Begin a session. `parameters`: the layouts that a version of this run may have."""
        return GrpcLink(self, parameters=parameters)

    def close(self) -> None:
        self._channel.close()

    # -- for GrpcLink --------------------------------------------------------------------------------------------------

    def reply(self, message: object, kind: type[T], *, seconds: float | None = CALL_SECONDS, secret: bytes = b"") -> T:
        """Send `message`; return the answer, a message. Arguments as of `ask`. Raises LinkError."""
        found: T = wire.decode(b"".join(self.ask(message, seconds=seconds, secret=secret)), kind)
        return found

    def ask(
        self, message: object, data: Iterable[bytes] = (), *, seconds: float | None = None, secret: bytes = b""
    ) -> Iterator[bytes]:
        """Send `message` and the bytes that belong to it; yield the answer's parts. `secret`: of an invite. Raises
        LinkError."""
        try:
            yield from self.stream("Call", itertools.chain([message], data), seconds=seconds, secret=secret)
        except grpc.RpcError as error:
            raise as_link_error(error, address=self.address) from None

    def stream(
        self, method: str, messages: Iterator[object], *, seconds: float | None = None, secret: bytes = b""
    ) -> Any:
        """Call the coordinator. Returns an iterator over the parts of its answer."""
        call = self._channel.stream_stream(f"/{wire.SERVICE}/{method}", request_serializer=_serialize)
        secrets = {wire.TOKEN_KEY: self.identity.token, wire.DEVICE_KEY: self._device, wire.INVITE_KEY: secret}
        metadata = tuple((key, value) for key, value in secrets.items() if value)
        return call(messages, timeout=seconds, metadata=metadata)


class GrpcLink:
    """A session, which is a `Link`. It sends heartbeats by itself."""

    def __init__(self, connection: Connection, *, parameters: Sequence[wire.Layout]) -> None:
        self._connection = connection
        self._parameters = parameters
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._inbox = Inbox()
        self.next_event, self.interrupted = self._inbox.next_event, self._inbox.interrupted
        self._progress: Progress | None = None
        """The content of heartbeats. None before the Hello, while the worker loads its data: then none is sent."""
        self._idle = threading.Event()
        """Not set during a transfer, unless the session is broken."""
        self._idle.set()
        self._broken: LinkError | None = None
        self.heard_at = 0.0
        """When the coordinator's last message arrived, in monotonic seconds; 0: never."""
        self.standbys: tuple[str, ...] = ()
        """Addresses of the machines that can take over as coordinator."""
        self._responses = connection.stream("Session", self._messages())
        self._reader = threading.Thread(target=self._read, name="reads-coordinator", daemon=True)
        self._reader.start()

    def call(self, message: ToCoordinator | NodeReport | JobNews) -> None:
        """Send a message. Any thread may call it, except with a contribution."""
        if isinstance(message, Goodbye):  # no `_check`: the coordinator may have ended the session already
            self._outgoing.put(message)
            self._outgoing.put(None)
            return
        self._check()
        match message:
            case Progress():
                self._progress = message  # goes with the next heartbeat
            case Contribution():
                parts = wire.Layout.of(message.tensors).parts(message.tensors) if message.valid else ()
                self._idle.clear()
                self._check()
                self._outgoing.put(itertools.chain([message], wire.chunks(parts)))
                self._idle.wait()
                self._check()
                self._progress = replace(self._progress or NOTHING_YET, part=0.0)
            case _:
                if isinstance(message, Hello):
                    self._progress = NOTHING_YET
                self._outgoing.put(message)

    def round_trip(self) -> float | None:
        """The round-trip time in seconds, measured now; None during a transfer, or if no answer comes."""
        began = time.perf_counter()
        with suppress(LinkError):
            if self._idle.is_set():
                self._connection.check()
                return time.perf_counter() - began
        return None

    def download(self, ref: TensorRef) -> Tensors:
        self._idle.clear()
        self._check()
        assert isinstance(ref, int)
        try:
            arriving = self._connection.ask(Download(version=ref))
            tensors = wire.received(arriving, self._parameters, memory=self._connection.memory)
            next(arriving, None)  # the end of the call
            return tensors
        except LinkError as error:
            self.final_stop()  # a Stop on its way comes before the break
            self._break(error)
            self._responses.cancel()
            raise
        finally:
            self._idle.set()

    def hold(self, reason: str) -> None:
        """End the session soon, as if the coordinator had sent a Stop. Any thread may call it."""
        self._inbox.put(Stop(reason=reason, again=True))

    def final_stop(self) -> Stop | None:
        """The Stop with which the coordinator ended this session, if it sent one. Errors after it do not matter."""
        self._reader.join(timeout=FAREWELL_SECONDS)
        return self._inbox.final_stop()

    def close(self) -> None:
        self._outgoing.put(None)
        self._reader.join(timeout=CALL_SECONDS)
        self._responses.cancel()
        self._reader.join()

    def _messages(self) -> Iterator[object]:
        """The outgoing messages, with the chunks of contributions; a heartbeat after a second without any."""
        while True:
            try:
                message = self._outgoing.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                if (message := self._progress) is None:
                    continue
            if message is None:
                return
            if isinstance(message, Iterator):
                yield from message
                self._idle.set()
            else:
                yield message

    def _read(self) -> None:
        problem = LinkError("the coordinator ended the session", hint="this machine tries again")
        try:
            for raw in self._responses:
                message: ToWorker | Order = wire.decode(raw, *FROM_COORDINATOR)
                self.heard_at = time.monotonic()
                if isinstance(message, Version):
                    self.standbys = message.standbys
                    message = replace(message, parameters=message.version)
                self._inbox.put(message)
        except grpc.RpcError as error:
            problem = as_link_error(error, address=Message("the coordinator"))
        except LinkError as error:
            problem = error
        self._break(problem)

    def _break(self, problem: LinkError) -> None:
        self._broken = self._broken or problem
        self._idle.set()
        self._inbox.put(problem)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken


def as_link_error(error: Any, *, address: str) -> LinkError:
    """The error to show to the user for a failed call, which gRPC raises as its own error."""
    # Text from the other end: the coordinator, or any program that listens at that address.
    code, details = error.code(), error.details() or str(error)
    why = details.rpartition(": ")[2]  # gRPC's layers put their own texts before it
    if code is grpc.StatusCode.UNAVAILABLE and any(word in details for word in BROKEN):
        details = BROKE
    # A complete sentence of ours is translated when it is shown.
    reason = Message(why if why in OF_THE_SYSTEM else one_line(details, most=MAX_TEXT))
    match code:
        case grpc.StatusCode.PERMISSION_DENIED:
            return Refused("the coordinator refused: {reason}", reason=reason, hint=COME_AGAIN)
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            template = "{address} cannot be reached: {reason}"
            return LinkError(template, address=address, reason=reason, hint="is the coordinator running?")
        case _:
            template = "{address} answered with an error: {reason}"
            return LinkError(template, address=address, reason=reason, hint="see the coordinator's log")


def _serialize(message: Any) -> bytes:
    return message if isinstance(message, bytes) else wire.encode(message)
