"""`cuadrilla standby` follows a crew's coordinator; `cuadrilla promote` takes over from one that is gone for good."""

import os
import shlex
import sys
from typing import Annotated

import typer

from cuadrilla.cli.crew import InviteFile, ListenAddress, joined_crew, read_invite
from cuadrilla.cli.output import options, say
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.link.address import listening_address
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, make_private, read_object

SURELY_GONE_SECONDS = 20.0
"""How long to ask for the old coordinator. Its parent restarts a killed one sooner, except on a very slow machine."""
STOP_FIRST = Message("stop `cuadrilla standby` there first")

Address = Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="Which crew, if this machine has joined several.")]


def standby(
    address: Address = "",
    listen: ListenAddress = "",
    invite_file: InviteFile = None,
) -> None:
    """Keep a copy of a crew's run and keys, ready to take over if its coordinator's machine is gone for good.

    Asks for an invite if this machine has not joined the crew before.
    """
    home = Home.of_user()
    invited = read_invite(home, address, invite_file)
    from cuadrilla.crew.standby import follow

    crew = joined_crew(home, address, name="", invited=invited)
    make_private(home.standby_folder(crew))
    with FolderLock(home.standby_folder(crew) / "lock", hint=STOP_FIRST):
        say("following  {address} as {name}; Ctrl-C ends it", address=crew.address, name=crew.name)
        follow(home, crew, listen=str(listening_address(listen)), report=say)


def promote(
    address: Address = "",
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to ask the old coordinator: it may be restarting.")
    ] = SURELY_GONE_SECONDS,
) -> None:
    """Coordinate the crew from this standby, because the old coordinator's machine is gone for good."""
    home = Home.of_user()
    crew = home.find_crew(address)
    if crew is None:
        raise LinkError("this machine has not joined a crew", hint="set up a standby beforehand: cuadrilla standby")
    from cuadrilla.crew.standby import check_gone
    from cuadrilla.crew.standby import promote as take_over

    folder = home.standby_folder(crew)
    known = read_object(folder / "standby.json")
    if not known:
        raise LinkError(
            "this machine is not a standby of the crew at {address}", address=crew.address, hint="cuadrilla standby"
        )
    with FolderLock(folder / "lock", hint=STOP_FIRST):
        check_gone(crew, seconds=wait, report=say)
        version = take_over(home, crew)
    announced = int(known["announced"])
    lost = max(0, announced - version)
    say(
        "promoted   continues from step {step}; the last step known from the old coordinator is {announced}",
        step=version,
        announced=announced,
    )
    say("           {lost} steps are lost" if lost else "           as far as is known, nothing is lost", lost=lost)
    command = ["up", str(folder / "run"), "--listen", str(known["listen"])]
    say("now        cuadrilla {command}", command=shlex.join(command))
    flags = [*(["--debug"] if options.debug else []), *(["--json"] if options.json else [])]
    os.execv(sys.executable, [sys.executable, "-m", "cuadrilla", *flags, *command])
