"""What a machine's owner decides: when it works for others, which code may run on it, which crew it leaves."""

import re
import shutil
from contextlib import closing, suppress
from typing import Annotated

import typer

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.home import Home
from cuadrilla.rundir import storage_errors

WhileIdle = Annotated[
    bool,
    typer.Option(
        "--while-idle",
        help="Work only while other programs use little of the processor, and begin only while no GPU is in use.",
    ),
]
OnPower = Annotated[bool, typer.Option("--on-power", help="Work only while the machine is not on battery.")]
LowPriority = Annotated[bool, typer.Option("--low-priority", help="Other programs go first.")]


def pause(
    off: Annotated[bool, typer.Option("--off", help="End a pause: the machine works again.")] = False,
) -> None:
    """Let this machine wait: its work goes to the others until `cuadrilla pause --off`."""
    home = Home.of_user()
    if not off and not home.joined():
        hint = "nothing to pause; Ctrl-C stops a training. Where a crew is coordinated: cuadrilla kick here-1"
        raise LinkError("this machine works for no crew of another machine", hint=hint)
    if off and not home.is_paused:
        say("this machine was not paused")
        return
    (home.unpause if off else home.pause)()
    waits = "work for others waits on this machine; to go on: cuadrilla pause --off"
    say("this machine works again" if off else waits)


def trust_code(sha256: str) -> None:
    """Allow code to run on this machine, by its SHA-256, also before it is fetched. Raises ConfigError."""
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ConfigError("{text!r} is not a hash of code", text=sha256[:80], hint="copy what `cuadrilla join` printed")
    Home.of_user().trust(sha256)
    say("{hash} may run on this machine", hash=sha256)


def leave(address: str) -> None:
    """Leave a crew: this machine's name there becomes free, and the crew's folder on this machine is deleted."""
    from cuadrilla.link.base import Refused
    from cuadrilla.link.client import Connection
    from cuadrilla.link.identity import load_node

    home = Home.of_user()
    crew = home.find_crew(address)
    if crew is None or crew not in home.joined():  # with a new address it might be another crew than the one meant
        raise LinkError("this machine has not joined that crew", hint="see what is in CUADRILLA_HOME/joined")
    try:
        with closing(Connection(crew.address, identity=load_node(crew.folder))) as connection, suppress(Refused):
            connection.leave()  # a kicked machine is refused
    except LinkError as error:
        say("the coordinator was not informed: {problem}", problem=error.message)
        say("there, `cuadrilla kick {name}` takes this machine off the list", name=crew.name)
    with storage_errors(crew.folder):
        shutil.rmtree(crew.folder)
    say("left the crew at {address}", address=crew.address)
