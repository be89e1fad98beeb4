"""Work for others that leaves a machine to its owner: options of `join`, and the verb `pause`."""

from pathlib import Path
from typing import Annotated

import typer

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, read_jsonl, read_object

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
    if name is None:
        if not off and not home.joined() and not home.nodes.exists():
            raise LinkError("this machine works for no crew", hint="nothing to pause; Ctrl-C stops a training")
        (home.unpause if off else home.pause)()
        say(
            "this machine works again"
            if off
            else "work for others waits on this machine; to go on: cuadrilla pause --off"
        )
        return
    known = home.paused_nodes if off else _known_nodes(home)
    if name not in known:
        raise ConfigError(
            "{name!r} is not paused" if off else "no node is named {name!r}",
            name=name[:80],
            hint="there are: {names}",
            names=", ".join(sorted(known)) or "-",
        )
    (home.unpause if off else home.pause)(name)
    say("{name} may work again" if off else "{name} waits; to go on: cuadrilla pause {name} --off", name=name)


def _known_nodes(home: Home) -> set[str]:
    """Nodes of this machine's crew: who may come, and who has joined its run, on a Ray cluster for example."""
    from cuadrilla.link.base import node_of
    from cuadrilla.link.nodes import AllowList

    run = read_object(home.open_file).get("run")
    rows = read_jsonl(RunDir(Path(run)).events) if run else []
    return {*AllowList(home.nodes).nodes(), *(node_of(row["worker"]) for row in rows if row["event"] == "joined")}
