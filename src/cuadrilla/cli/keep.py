"""What a machine keeps of its crews: `join --trust` approves code, `join --forget` leaves a crew."""

import re
import shutil
from contextlib import closing, suppress

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.home import Home
from cuadrilla.rundir import storage_errors

MIN_DIGITS = 8


def trust_code(sha256: str) -> None:
    """Approve code by its SHA-256, or the beginning of it: it may run on this machine. Raises ConfigError."""
    from cuadrilla.crew.bundle import fetched_code

    home = Home.of_user()
    found = {each for each in fetched_code(home) if each.startswith(sha256) and len(sha256) >= MIN_DIGITS}
    if re.fullmatch("[0-9a-f]{64}", sha256):  # it may be approved before it is fetched
        found = {sha256}
    if len(found) != 1:
        raise ConfigError(
            "{text!r} is not a hash of code that was fetched to this machine",
            text=sha256[:80],
            hint="copy what `cuadrilla join` printed, or its first 8 characters",
        )
    home.trust(*found)
    say("{hash} may run on this machine", hash=found.pop())


def leave(address: str) -> None:
    """Leave a crew that this machine has joined: its name there becomes free, what is kept of it here is deleted."""
    from cuadrilla.link.base import Refused
    from cuadrilla.link.client import Connection
    from cuadrilla.link.identity import load_node

    crew = Home.of_user().find_crew(address)
    if crew is None:
        raise LinkError("this machine has not joined that crew", hint="see what is in CUADRILLA_HOME/joined")
    try:
        with closing(Connection(crew.address, identity=load_node(crew.folder))) as connection, suppress(Refused):
            connection.leave()  # who was kicked is refused
    except LinkError as error:
        say("the coordinator could not be told: {problem}", problem=error.message)
        say("there, `cuadrilla kick {name}` takes this machine off the list", name=crew.name)
    with storage_errors(crew.folder):
        shutil.rmtree(crew.folder)
    say("left the crew at {address}", address=crew.address)
