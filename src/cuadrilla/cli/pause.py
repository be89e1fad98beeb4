"""Work for others that leaves a machine to its owner: options of `join`, and the verbs `pause` and `unpause`."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home

if TYPE_CHECKING:
    from cuadrilla.engines.courtesy import Manners

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
WhileIdle = Annotated[
    bool, typer.Option("--while-idle", help="Work only while other programs use little of the processor.")
]
OnPower = Annotated[bool, typer.Option("--on-power", help="Work only while the machine is not on battery.")]
LowPriority = Annotated[bool, typer.Option("--low-priority", help="Other programs go first.")]
MaxMemory = Annotated[
    str, typer.Option("--max-memory", metavar="SIZE", help="Memory that each worker may use, such as 4GiB (Linux).")
]
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A node of the crew that this machine coordinates (default: this machine)."),
]


def manners_of(*, while_idle: bool, on_power: bool, low_priority: bool, max_memory: str) -> "Manners":
    """What was asked for; priority and memory hold from now on. Raises ConfigError, EnvironmentProblem."""
    from cuadrilla.engines.courtesy import Manners, behave

    manners = Manners(
        while_idle=while_idle,
        on_power=on_power,
        low_priority=low_priority,
        max_memory_bytes=parse_size(max_memory) if max_memory else 0,
    )
    behave(manners)
    return manners


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `500 MB`, `4g`, `1073741824`: K, M, G and T are powers of 1024. Raises ConfigError."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError("{text!r} is not a size", text=text[:80], hint="such as 4GiB")
    return int(float(found[1]) * 2 ** UNITS[found[2].upper()])


def pause(name: Name = "") -> None:
    """Let a machine wait: its work goes to the others until `cuadrilla unpause`."""
    _change(name, waits=True)
    if name:
        say("{name} waits; it works again after: cuadrilla unpause {name}", name=name)
    else:
        say("work for others waits on this machine; it goes on after: cuadrilla unpause")


def unpause(name: Name = "") -> None:
    """End what `cuadrilla pause` began."""
    _change(name, waits=False)
    say("{name} may work again", name=name) if name else say("this machine works again")


def _change(name: str, *, waits: bool) -> None:
    """Raises ConfigError for a name that is none of this machine's crew."""
    home = Home.of_user()
    nodes = home.paused_nodes
    if not name:
        home.pause(nodes=nodes, here=waits)
        return
    from cuadrilla.link.nodes import AllowList

    listed = AllowList(home.nodes).nodes()
    if waits and name not in listed:
        raise ConfigError(
            "no node is named {name!r}",
            name=name[:80],
            hint="in this crew: {names}",
            names=", ".join(sorted(listed)) or "-",
        )
    home.pause(nodes=nodes | {name} if waits else nodes - {name}, here=home.is_paused)
