"""What a machine keeps of its crews: `join --trust` approves code, `join --forget` leaves a crew."""

import re
import shutil
from contextlib import closing

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.rundir import storage_errors


def trust_code(sha256: str) -> None:
    """Approve code by its SHA-256, or the beginning of it: it may run on this machine. Raises ConfigError."""
    home = Home.of_user()
    whole = whole_hash(sha256, home=home)
    home.trust(whole)
    say("{hash} may run on this machine", hash=whole)


def whole_hash(text: str, *, home: Home) -> str:
    """The hash that `text` is, or begins: then of code that `join` has fetched. Raises ConfigError."""
    from cuadrilla.crew.bundle import fetched_code

    if not re.fullmatch(r"[0-9a-f]{8,64}", text):
        raise ConfigError(
            "{text!r} is not a hash",
            text=text[:80],
            hint="copy at least 8 of the 64 characters that `cuadrilla join` printed",
        )
    if len(text) == 64:
        return text
    found = [sha256 for sha256 in fetched_code(home) if sha256.startswith(text)]
    if not found:
        raise ConfigError(
            "no fetched code has a hash that begins with {text}", text=text, hint="type all 64 characters of it"
        )
    if len(found) > 1:
        hashes = ", ".join(found)
        raise ConfigError(
            "{text} begins {number} hashes: {hashes}",
            text=text,
            number=len(found),
            hashes=hashes,
            hint="type one of them",
        )
    return found[0]


def leave(address: str) -> None:
    """Leave a crew that this machine has joined: its name there becomes free, what is kept of it here is deleted."""
    crew = Home.of_user().find_crew(address)
    if crew is None or (address and crew.address != address and not crew.folder.exists()):
        raise LinkError("this machine has not joined that crew", hint="see what is in CUADRILLA_HOME/joined")
    problem = _tell_leaving(crew)
    with storage_errors(crew.folder):
        shutil.rmtree(crew.folder)
    say("left the crew at {address}", address=crew.address)
    if problem:
        say("the coordinator could not be told: {problem}", problem=problem)
        say("there, `cuadrilla kick {name}` takes this machine off the list", name=crew.name)


def _tell_leaving(crew: Joined) -> str:
    """Have the coordinator take this machine off its list; why it did not, if so."""
    from cuadrilla.link.base import Refused
    from cuadrilla.link.client import Connection
    from cuadrilla.link.identity import load_node

    try:
        with closing(Connection(crew.address, identity=load_node(crew.folder))) as connection:
            connection.leave()
    except Refused:  # it was kicked
        return ""
    except LinkError as error:
        return error.message
    return ""
