"""How this machine comes into a crew: an invite becomes a certificate of its own key."""

import random
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from cuadrilla.home import Home, Joined
from cuadrilla.link.address import Address
from cuadrilla.link.base import Busy
from cuadrilla.link.grpc_client import Connection, Enrolled
from cuadrilla.link.invite import Invite, check_node_name
from cuadrilla.link.tls import enrol_identity, node_request, pinned_certificate, save_node
from cuadrilla.messages import Message

BUSY_SECONDS = 60.0


def enrol(home: Home, text: str, *, address: str, name: str, report: Callable[[str], None]) -> Joined:
    """Check who answers, then trade the invite for a certificate of this machine's own key.

    `name`: empty for its host name, or that with a number if another machine has it. `report` hears what was done.
    Raises LinkError.
    """
    wanted = name or host_name()
    check_node_name(wanted)
    invite = Invite.parse(text)
    if address:
        invite = replace(invite, address=Address.parse(address))
    pinned = pinned_certificate(invite)
    folder = home.joined_folder(invite.key_hash)
    request = node_request(folder, name=wanted)
    connection = Connection(str(invite.address), identity=enrol_identity(pinned))
    try:
        enrolled = _when_free(
            lambda: connection.enroll(secret=invite.secret, request=request, numbered=not name), report=report
        )
    finally:
        connection.close()
    save_node(folder, certificate=enrolled.certificate, ca=enrolled.ca, server=pinned)
    crew = Joined(folder=folder, address=str(invite.address), name=enrolled.name)
    home.remember(crew)
    told = "joined     the crew at {address} as {name}"
    if crew.name != wanted:
        told = "joined     the crew at {address} as {name}: another machine there is already called {wanted}"
    report(Message(told, address=crew.address, name=crew.name, wanted=wanted))
    return crew


def _when_free(enroll: Callable[[], Enrolled], *, report: Callable[[str], None]) -> Enrolled:
    """A whole classroom may come from one address, and a coordinator takes four at a time. Raises LinkError."""
    deadline, told = time.monotonic() + BUSY_SECONDS, False
    while True:
        try:
            return enroll()
        except Busy:
            if time.monotonic() > deadline:
                raise
            if not told:
                report(Message("waiting    for other machines that are joining from the same address"))
            told = True
            time.sleep(random.uniform(0.5, 1.5))  # seconds


def host_name() -> str:
    """This machine's name, as far as it can be a node's."""
    plain = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower().partition(".")[0]).strip("-")
    return plain[:63].strip("-") or "node"
