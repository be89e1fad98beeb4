"""How this machine joins a crew: it trades an invite for a token."""

import re
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace

from cuadrilla.errors import LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.link.address import Address
from cuadrilla.link.base import check_node_name
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import Identity, load_node, pinned_certificate, save_node
from cuadrilla.link.invite import Invite
from cuadrilla.messages import Message


def enrol(home: Home, text: str, *, address: str, name: str, report: Callable[[str], None]) -> Joined:
    """Check the coordinator's key, then trade the invite for a token. A machine that has one keeps its name there.

    `name` "": the one that it has in the crew, else its host name. `report` gets what was done. Raises LinkError.
    """
    invite = Invite.parse(text)
    if address:
        invite = replace(invite, address=Address.parse(address))
    folder = home.joined_folder(invite.key_hash)
    known = next((crew.name for crew in home.joined() if crew.folder == folder), "")
    wanted = name or known or host_name()
    check_node_name(wanted)
    pinned = pinned_certificate(invite)
    identity = Identity(certificate=pinned)
    with suppress(LinkError):  # it has no token, or none that it could use
        identity = replace(identity, token=load_node(folder).token)
    with closing(Connection(str(invite.address), identity=identity)) as connection:
        name_there, token = connection.enroll(wanted, secret=invite.secret)
    save_node(folder, replace(identity, token=token))
    crew = Joined(folder=folder, address=str(invite.address), name=name_there)
    home.remember(crew)
    message = "joined     the crew at {address} as {name}"
    if crew.name != wanted:
        message = "joined     the crew at {address} as {name}: another machine there is already called {wanted}"
    report(Message(message, address=crew.address, name=crew.name, wanted=wanted))
    return crew


def host_name() -> str:
    """This machine's host name, with only the characters of a node's name."""
    plain = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower().partition(".")[0]).strip("-")
    return plain[:63].strip("-") or "node"
