"""Whether machines reach each other in both directions on a private network, as ranks must: tried before they start.

All machines run `meet` at once. Number 0 listens where torch will. Each of the others dials it, says at which
address and port it listens itself, and is dialled there: what answers must know the number that this machine has just
drawn, so that no other machine with the same address is taken for it. Everybody hears how it went for all.

Nothing is trusted that comes from the network: a line of bounded length, of which only numbers and an address are used.
"""

import ipaddress
import json
import platform
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from cuadrilla.errors import EnvironmentProblem, LinkError
from cuadrilla.host.card import addresses
from cuadrilla.host.reachability import read_reachability
from cuadrilla.messages import Message

DIAL_SECONDS = 5.0
AGAIN_SECONDS = 0.5
LONGEST_LINE = 1000
CREW = (
    "a crew needs one open port only: `cuadrilla up RUN --listen {address}` on that machine, `cuadrilla join` on the"
    " others"
)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """`number`: of this machine among `machines`, 0 at `address`. `seconds`: how long to wait for the others.

    `agreed`: what all of them must say alike.
    """

    address: str
    port: int
    machines: int
    number: int
    seconds: float
    agreed: str = ""


@dataclass(frozen=True, kw_only=True)
class Met:
    """`card`: the network card that leads to the others. `connections`: at number 0 one to each of them, by number; at
    any other the one to number 0.
    """

    card: str
    connections: Mapping[int, socket.socket]


def meet(meeting: Meeting) -> str:
    """The network card of this machine that leads to the others. Raises what `meet_and_stay` raises."""
    met = meet_and_stay(meeting)
    for connection in met.connections.values():
        connection.close()
    return met.card


def meet_and_stay(meeting: Meeting) -> Met:
    """Those who have met stay connected.

    Raises EnvironmentProblem where ranks cannot work, LinkError if the machines do not reach each other.
    """
    if platform.system() != "Linux":
        raise EnvironmentProblem(
            "ranks on several machines need Linux on all of them, and this is {system}",
            system=platform.system(),
            hint=CREW,
            address=meeting.address,
        )
    host = private_address(meeting.address)
    own = host if meeting.number == 0 else _own_address(host, meeting.port)
    with ExitStack() as stack:
        connections: dict[int, socket.socket] = {}
        if meeting.number == 0:
            problem = _receive(host, meeting, connections, stack)
        else:
            problem, connections[0] = _visit(host, own, meeting, stack)
        if problem:
            raise _unreachable(problem, own, meeting)
        met = Met(card=card_of(own, addresses()), connections=connections)
        stack.pop_all()
    return met


def private_address(name: str) -> str:
    """The number of an address or name. Raises EnvironmentProblem for one that the whole internet may reach."""
    try:
        found = ipaddress.ip_address(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            "{address} is not an address: {reason}", address=name, reason=error, hint="its number on the local network"
        ) from None
    if found.is_global or found.is_unspecified:
        raise EnvironmentProblem(
            "{address} is a public address: whoever reaches torch's ports there can run programs on these machines",
            address=name,
            hint="take the address of a private network, or a crew, which is encrypted: cuadrilla up, cuadrilla join",
        )
    return str(found)


def card_of(address: str, cards: Mapping[str, Sequence[str]]) -> str:
    """The name of the card that has this address. Raises EnvironmentProblem."""
    card = next((card for card, own in cards.items() if address in own), "")
    if not card:
        raise EnvironmentProblem(
            "no network card of this machine has the address {address}",
            address=address,
            hint="MASTER_ADDR is the address of machine 0 itself; a container shares it with --network host",
        )
    return card


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise LinkError(
                "there is no way to {address}: {reason}",
                address=host,
                reason=error.strerror,
                hint="is this machine on the same network?",
            ) from None
        return str(probe.getsockname()[0])


def _listener(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


# -- number 0 ----------------------------------------------------------------------------------------------------------


def _receive(host: str, meeting: Meeting, visitors: dict[int, socket.socket], stack: ExitStack) -> str:
    """What is wrong, "" if nothing is; those who have come are told the same."""
    card_of(host, addresses())
    try:
        listener = _listener(host, meeting.port)
    except OSError as error:
        raise LinkError(
            "cannot listen at {address}:{port}: {reason}",
            address=host,
            port=meeting.port,
            reason=error.strerror,
            hint="end what listens there, or take another MASTER_PORT on all machines",
        ) from None
    with listener:
        problem = _gather(listener, visitors, meeting, stack)
    for connection in visitors.values():
        with suppress(OSError):
            connection.sendall(json.dumps({"problem": problem}).encode() + b"\n")
    return problem


def _gather(listener: socket.socket, visitors: dict[int, socket.socket], meeting: Meeting, stack: ExitStack) -> str:
    """Until all are there and were reached, or the first problem. Who goes away before is waited for again."""
    deadline = time.monotonic() + meeting.seconds
    while missing := [number for number in range(1, meeting.machines) if number not in visitors]:
        left = max(deadline - time.monotonic(), 0)
        ready = select.select([listener, *visitors.values()], [], [], left)[0]
        if not ready:
            told = "machine {numbers} did not call within {seconds:.0f} s"
            return Message(told, numbers=", ".join(map(str, missing)), seconds=meeting.seconds)
        for gone in [each for each, connection in visitors.items() if connection in ready]:
            visitors.pop(gone).close()  # a visitor says one line only: it has ended
        if listener not in ready:
            continue
        connection = stack.enter_context(listener.accept()[0])
        said = _read(connection)
        number = said.get("number")
        if type(number) is not int or not 0 < number < meeting.machines:
            connection.close()  # a stranger's
            continue
        if number in visitors:
            return Message("two machines say that they are number {number}", number=number)
        visitors[number] = connection
        if said.get("agreed", "") != meeting.agreed:
            return Message("machine {number} was started with other machines, processes or ports", number=number)
        if problem := _problem_of(number, said):
            return problem
    return ""


def _problem_of(number: int, said: Mapping[str, Any]) -> str:
    """Dial a machine where it says that it listens; "" if it is there."""
    address, port, drawn = (said.get(key) for key in ("address", "port", "drawn"))
    try:
        parsed = ipaddress.ip_address(str(address))
        if parsed.is_global or not isinstance(port, int) or not 0 < port < 2**16:
            raise ValueError
        with socket.create_connection((str(parsed), port), timeout=DIAL_SECONDS) as connection:
            if _read(connection).get("drawn") == drawn:
                return ""
            reason: str = Message("another machine answers there")
    except OSError as error:
        reason = error.strerror or Message("no answer")
    except ValueError:
        reason = Message("it is not an address of a private network")
    return Message(
        "machine {number} reaches this one, but not the other way round: {address}: {reason}",
        number=number,
        address=str(address)[:LONGEST_LINE],
        reason=reason,
    )


# -- the others --------------------------------------------------------------------------------------------------------


def _visit(host: str, own: str, meeting: Meeting, stack: ExitStack) -> tuple[str, socket.socket]:
    """What is wrong, as number 0 has it, and the connection to it."""
    deadline = time.monotonic() + meeting.seconds
    with _listener(own, 0) as listener:
        while True:
            connection = stack.enter_context(_dialled(host, meeting, deadline))
            heard = _heard(connection, listener, own, meeting, deadline)
            if heard is not None:
                return heard, connection
            connection.close()
            time.sleep(AGAIN_SECONDS)  # it was another program, as torch's store of a training before, or it was killed


def _heard(
    connection: socket.socket, listener: socket.socket, own: str, meeting: Meeting, deadline: float
) -> str | None:
    """What is wrong, or that it is not known in time; None if who answers is not number 0 of a meeting."""
    drawn = secrets.token_hex(16)
    said = {
        "number": meeting.number,
        "agreed": meeting.agreed,
        "address": own,
        "port": listener.getsockname()[1],
        "drawn": drawn,
    }
    with suppress(OSError):
        connection.sendall(json.dumps(said).encode() + b"\n")
    deadline += 2 * DIAL_SECONDS  # what machine 0 finds at the very end is to be heard
    while (left := deadline - time.monotonic()) > 0:
        ready = select.select([listener, connection], [], [], left)[0]
        if listener in ready:
            with listener.accept()[0] as caller, suppress(OSError):
                caller.sendall(json.dumps({"drawn": drawn}).encode() + b"\n")
        elif connection in ready:
            problem = _read(connection).get("problem")
            return problem if isinstance(problem, str) else None
    return Message("machine 0 did not answer within {seconds:.0f} s", seconds=meeting.seconds)


def _dialled(host: str, meeting: Meeting, deadline: float) -> socket.socket:
    """A connection to machine 0, which may start later."""
    while True:
        try:
            connection = socket.create_connection((host, meeting.port), timeout=DIAL_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LinkError(
                    "{address}:{port} is not reached: {reason}",
                    address=host,
                    port=meeting.port,
                    reason=error.strerror or Message("no answer"),
                    hint="start machine 0, and let this port through its firewall",
                ) from None
            time.sleep(AGAIN_SECONDS)
        else:
            return connection


def _read(connection: socket.socket) -> Mapping[str, Any]:
    """A line of JSON; nothing for anything else."""
    connection.settimeout(DIAL_SECONDS)
    text = b""
    with suppress(OSError, ValueError):
        while not text.endswith(b"\n") and len(text) < LONGEST_LINE:
            part = connection.recv(LONGEST_LINE)
            if not part:
                break
            text += part
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def _unreachable(problem: str, own: str, meeting: Meeting) -> LinkError:
    placed = read_reachability(own, system=platform.system())
    details = [Message("this machine is {noticed}", noticed=placed.noticed)] if placed.noticed else []
    return LinkError(
        "ranks on these machines cannot find each other: {problem}",
        problem=problem,
        details=details,
        hint=CREW,
        address=meeting.address,
    )
