"""The way to a coordinator (`doctor HOST:PORT`), one step after another, until the first that is broken.

    name → tcp → tls → credentials → clock → download → upload → exchange

A machine that has joined no crew at that address ends at tls. Each step needs those before it, so the first broken one
is the cause, and its hint the remedy. Every step has a time limit (the system's own for a name). Nothing is sent before
TLS has shown that the other end is the coordinator of this crew.
"""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import psutil

from cuadrilla.doctor.diagnosis import Diagnosis, Shell, fail, ok, set_clock, warn
from cuadrilla.errors import LinkError
from cuadrilla.home import Joined
from cuadrilla.link.address import Address
from cuadrilla.link.identity import ANOTHER_PROGRAM, is_of_coordinator, key_hash, load_node, shown_certificate
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from cuadrilla.link.client import Connection

CONNECT_SECONDS = 5.0
MEASURE_SECONDS = 2.0
SMALL_SEGMENT_BYTES = 1200
"""Of TCP in a packet: 1280 bytes, the least that IPv6 allows, hold 1208. As both ends' cards allow it; a smaller packet
between them is noticed only by what is lost.
"""
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
NUM_ROUND_TRIPS = 5
BIG_CLOCK_DIFFERENCE_SECONDS = 60.0
SLOW_BYTES_PER_SECOND = 25e6
LOPSIDED = 4.0
EXAMPLE_PARAMETERS, PARAMETER_BYTES = 10_000_000, 4
WORK_PER_EXCHANGE = 9
"""So many times as long as it exchanges a step has to compute for nine tenths of the time to be work."""
MOVED = Message("it may have another address by now; its screen shows it: cuadrilla doctor THAT_ADDRESS")
COMMANDS: Mapping[str, tuple[str, Shell]] = {
    "name": ("cuadrilla doctor ADDRESS:{port}", "here"),
    "tcp": ("cuadrilla doctor --port {port}", "coordinator"),
    "tls": ("cuadrilla invite", "coordinator"),
    "credentials": ("cuadrilla invite", "coordinator"),
}
"""What to type where a step is broken: mostly there, since a firewall and a program are there."""
Step = tuple[str, Callable[[], Diagnosis]]


def walk(address: Address, *, crew: Joined | None) -> Iterator[tuple[str, Diagnosis]]:
    """Each step's name and what was found, as it is done. `crew`: the one there, if this machine has joined it."""
    with closing(_steps(address, crew)) as steps:
        for name, step in steps:
            try:
                found = step()
            except LinkError as error:
                yield name, _broken(name, error, address=address, joined=crew is not None)
                return
            yield name, found


def _steps(address: Address, crew: Joined | None) -> Generator[Step, None, None]:
    yield "name", lambda: _name(address)
    yield "tcp", lambda: _tcp(address)
    yield "tls", lambda: _tls(address, crew)
    if crew is None:
        yield "member", lambda: ok(Message("it answers; the rest is tested once this machine has joined"))
        return
    with closing(_Calls(address, crew)) as calls:
        yield "credentials", calls.credentials
        yield "clock", calls.clock
        yield "download", calls.download
        yield "upload", calls.upload
        yield "exchange", lambda: exchange(calls.rates["download"], calls.rates["upload"])


def _broken(name: str, error: LinkError, *, address: Address, joined: bool) -> Diagnosis:
    command, shell = COMMANDS.get(name, ("cuadrilla doctor {address}", "here"))
    if name == "tls" and joined:
        command, shell = "cuadrilla join --new", "here"
    text = command.format(address=address, port=address.port)
    return fail(error.message, remedy=error.hint, command=text, shell=shell)


def _name(address: Address) -> Diagnosis:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise LinkError(
            "no machine named {host} is known here ({reason})",
            host=address.host,
            reason=getattr(error, "strerror", None) or error,
            hint="give the coordinator's IP address: cuadrilla doctor 192.168.1.50:{port}",
            port=address.port,
        ) from None
    addresses = dict.fromkeys(str(each[4][0]) for each in found)
    if list(addresses) == [address.host]:
        return ok(Message("{host} is an address", host=address.host))
    return ok(Message("{host} is {addresses}", host=address.host, addresses=", ".join(addresses)))


def _tcp(address: Address) -> Diagnosis:
    with _connected(address) as plain:
        there, own = plain.getpeername()[0], plain.getsockname()[0]
        segment = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) if hasattr(socket, "TCP_MAXSEG") else 0
    cards = psutil.net_if_addrs().items()
    card = next((card for card, all_ in cards if own in (each.address for each in all_)), "")
    answers = Message("{address} answers at {place}, from {own} ({card})", address=address, place=there, own=own,
                      card=card)  # fmt: skip
    if not 0 < segment < SMALL_SEGMENT_BYTES:
        return ok(answers)
    small = Message(
        "its packets bring {segment} bytes at most, which is slow: one of the two machines has a card with a small MTU "
        "(`cuadrilla doctor` there says which)",
        segment=segment,
    )
    return warn(answers, remedy=small, command="cuadrilla doctor", shell="coordinator")


def _tls(address: Address, crew: Joined | None) -> Diagnosis:
    """The other end is the coordinator of this crew; for a stranger: some coordinator."""
    certificate = shown_certificate(address, timeout_seconds=CONNECT_SECONDS)
    if crew is not None:
        if key_hash(certificate) != key_hash(load_node(crew.folder).certificate):
            raise LinkError(
                "what answers at {address} is not the coordinator of the crew that this machine has joined",
                address=address,
                hint="check the address; if the crew was recreated there, get an invite, then: cuadrilla join --new",
            )
        return ok(Message("the key belongs to this crew"))
    if not is_of_coordinator(certificate):
        raise LinkError("what answers at {address} is no coordinator of cuadrilla", address=address,
                        hint=ANOTHER_PROGRAM)  # fmt: skip
    return ok(Message("a coordinator of cuadrilla"))


@contextmanager
def _connected(address: Address) -> Iterator[socket.socket]:
    """A TCP connection. Raises LinkError if there is none; what happens on it is the caller's."""
    try:
        plain = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
    except TimeoutError:
        problem = "{address} did not answer within {seconds:g} s"
        raise LinkError(problem, address=address, seconds=CONNECT_SECONDS, hint=_firewall(address)) from None
    except ConnectionRefusedError:
        hint = Message(
            "start the coordinator there (cuadrilla up RUN); {moved}. If not, compare the port that it prints",
            moved=MOVED,
        )
        raise LinkError("nothing listens at {address}", address=address, hint=hint) from None
    except OSError as error:
        hint = _apart() if error.errno in UNREACHABLE else _firewall(address)
        reason = error.strerror or error
        raise LinkError("cannot reach {address}: {reason}", address=address, reason=reason, hint=hint) from None
    with plain:
        yield plain


def _firewall(address: Address) -> Message:
    hint = "{moved}. If not, allow TCP port {port} in the firewall of the coordinator's machine"
    return Message(hint, moved=MOVED, port=address.port)


def _apart() -> Message:
    """What to do where the network does not lead there."""
    if sys.platform == "darwin":  # macOS 15 and later ask for each program
        return Message("System Settings, Privacy & Security, Local Network: allow this terminal; then try again")
    return Message(
        "{moved}. If not, check that both machines are on the same network (cable, Wi-Fi, VPN) and that the Wi-Fi does "
        "not isolate them",
        moved=MOVED,
    )


class _Calls:
    """The steps that are calls of a member. `rates`: bytes per second by direction, once measured."""

    def __init__(self, address: Address, crew: Joined) -> None:
        self._address, self._crew = address, crew
        self._stack = contextlib.ExitStack()
        self.rates: dict[str, float] = {}
        self.close = self._stack.close

    def credentials(self) -> Diagnosis:
        self._connection = self._stack.enter_context(closing(self._dial()))
        files = self._connection.describe().files
        megabytes = sum(file.num_bytes for file in files) / 1e6
        return ok(Message("admitted; files of the run: {count} ({megabytes:.1f} MB)", count=len(files),
                          megabytes=megabytes))  # fmt: skip

    def _dial(self) -> "Connection":
        try:
            from cuadrilla.link.client import Connection  # not before: it loads torch, which takes seconds
        except (ImportError, OSError) as error:
            raise LinkError("the calls need PyTorch: {reason}", reason=error, hint="see nvidia.torch above") from None
        return Connection(str(self._address), identity=load_node(self._crew.folder))

    def clock(self) -> Diagnosis:
        """Only for information. The fastest of some calls tells best."""
        trips = []
        for _ in range(NUM_ROUND_TRIPS):
            began, wall = time.monotonic(), time.time()
            theirs = self._connection.clock()
            took = time.monotonic() - began
            trips.append((took, theirs - (wall + took / 2)))
        return compared(*min(trips))

    def download(self) -> Diagnosis:
        began = time.monotonic()
        return self._rate("download", self._connection.receive_for(MEASURE_SECONDS), began)

    def upload(self) -> Diagnosis:
        began = time.monotonic()
        return self._rate("upload", self._connection.send_for(MEASURE_SECONDS), began)

    def _rate(self, direction: str, num_bytes: int, began: float) -> Diagnosis:
        self.rates[direction] = rate = num_bytes / max(time.monotonic() - began, 1e-9)
        return ok(Message("{rate:.1f} MB/s ({bits:.0f} Mbit/s)", rate=rate / 1e6, bits=rate * 8 / 1e6))


def compared(took: float, ahead: float) -> Diagnosis:
    """The coordinator's clock, `ahead` seconds of this one's; a call took `took`."""
    hours = abs(ahead) / 3600
    if abs(ahead) <= max(took, BIG_CLOCK_DIFFERENCE_SECONDS):
        return ok(Message("the same within a minute; round trip {milliseconds:.1f} ms", milliseconds=1000 * took))
    template = (
        "the coordinator's is {hours:.1f} hours ahead" if ahead > 0 else "the coordinator's is {hours:.1f} hours behind"
    )
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    remedy = Message("training is not affected; set the clocks so that you can compare the logs of the two machines")
    return warn(Message(template, hours=hours), remedy=remedy, command=set_clock(is_root=is_root))


def exchange(download: float, upload: float) -> Diagnosis:
    """What two rates (bytes per second) mean for a step: all weights come here and all gradients go back."""
    megabytes = EXAMPLE_PARAMETERS * PARAMETER_BYTES
    seconds = sum(megabytes / max(rate, 1.0) for rate in (download, upload))
    cause = Message("{seconds:,.1f} s in each step for {millions} million parameters", seconds=seconds,
                    millions=EXAMPLE_PARAMETERS // 10**6)  # fmt: skip
    slow, fast = sorted((download, upload))
    if slow >= SLOW_BYTES_PER_SECOND:
        return ok(cause)
    if fast > LOPSIDED * slow:
        return warn(cause, remedy=Message(
            "one direction is much slower: under WSL, switch off Large Send Offload of vEthernet (WSL) in Windows; "
            "else look at the cable"
        ))  # fmt: skip
    return warn(cause, remedy=Message(
        "a cable is faster than Wi-Fi. Exchange less often: choose train.batch_sequences so large that a step computes "
        "for {work:,.0f} s; or leave this machine out", work=WORK_PER_EXCHANGE * seconds,
    ))  # fmt: skip
