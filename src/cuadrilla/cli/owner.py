"""What a machine's owner decides: when it works for others, which code may run on it, which crew it leaves."""

import re
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, read_jsonl, read_object, storage_errors

MIN_DIGITS = 8
WhileIdle = Annotated[
    bool,
    typer.Option(
        "--while-idle",
        help="Work only while other programs use little of the processor and of the GPU, as far as that is told.",
    ),
]
OnPower = Annotated[bool, typer.Option("--on-power", help="Work only while the machine is not on battery.")]
LowPriority = Annotated[bool, typer.Option("--low-priority", help="Other programs go first.")]
Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="A node of the crew that this machine coordinates (default: this machine)."),
]


def pause(
    name: Name = None,
    off: Annotated[bool, typer.Option("--off", help="End a pause: the machine works again.")] = False,
) -> None:
    """Let a machine wait: its work goes to the others until `cuadrilla pause --off`."""
    home = Home.of_user()
    change = home.unpause if off else home.pause
    if name is None:
        if not off and not home.joined() and not home.nodes.exists():
            raise LinkError("this machine works for no crew", hint="nothing to pause; Ctrl-C stops a training")
        change()
        waits = "work for others waits on this machine; to go on: cuadrilla pause --off"
        say("this machine works again" if off else waits)
        return
    known = home.paused_nodes if off else _known_nodes(home)
    if name not in known:
        problem = "{name!r} is not paused" if off else "no node is named {name!r}"
        names = ", ".join(sorted(known)) or "-"
        raise ConfigError(problem, name=name[:80], hint="there are: {names}", names=names)
    change(name)
    say("{name} may work again" if off else "{name} waits; to go on: cuadrilla pause {name} --off", name=name)


def _known_nodes(home: Home) -> set[str]:
    """Nodes of this machine's crew: who may come, and who has joined its run, on a Ray cluster for example."""
    from cuadrilla.link.base import node_of
    from cuadrilla.link.nodes import AllowList

    run = read_object(home.open_file).get("run")
    rows = read_jsonl(RunDir(Path(run)).events) if run else []
    return {*AllowList(home.nodes).nodes(), *(node_of(row["worker"]) for row in rows if row["event"] == "joined")}


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
