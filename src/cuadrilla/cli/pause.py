"""Work for others that leaves a machine to its owner: options of `join`, and the verb `pause`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from filelock import FileLock, Timeout

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, make_private

if TYPE_CHECKING:
    from cuadrilla.crew.idle_policy import OwnerRules

TURN_SECONDS = 10.0
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


def rules_of(*, while_idle: bool, on_power: bool, low_priority: bool) -> "OwnerRules":
    """What was asked for; the priority holds from now on."""
    from cuadrilla.crew.idle_policy import OwnerRules, set_priority

    rules = OwnerRules(while_idle=while_idle, on_power=on_power, low_priority=low_priority)
    set_priority(rules)
    return rules


def pause(
    name: Name = None,
    off: Annotated[bool, typer.Option("--off", help="End a pause: the machine works again.")] = False,
) -> None:
    """Let a machine wait: its work goes to the others until `cuadrilla pause --off`."""
    if off:
        _end(name)
    elif name is None:
        _change(here=True)
        say("work for others waits on this machine; it goes on after: cuadrilla pause --off")
    elif name not in (known := _known_nodes()):
        raise ConfigError(
            "no node is named {name!r}",
            name=name[:80],
            hint="in this crew: {names}",
            names=", ".join(sorted(known)) or "-",
        )
    else:
        _change(begun=name)
        say("{name} waits; it works again after: cuadrilla pause {name} --off", name=name)


def _end(name: str | None) -> None:
    """Raises ConfigError for a node that is not paused."""
    if name is None:
        _change(here=False)
        say("this machine works again")
        return
    waiting = Home.of_user().paused_nodes
    if name not in waiting:
        raise ConfigError(
            "{name!r} is not paused",
            name=name[:80],
            hint="paused: {names}",
            names=", ".join(sorted(waiting)) or "-",
        )
    _change(ended=name)
    say("{name} may work again", name=name)


def forget(name: str) -> None:
    """A node has been sent away: whoever has its name next may work. Raises ResourceError, ConfigError."""
    if name in Home.of_user().paused_nodes:
        _change(ended=name)


def _known_nodes() -> set[str]:
    """Of this machine's crew: who may come, and whoever works for its run now, on a Ray cluster for example."""
    from cuadrilla.link.base import COORDINATOR, node_of
    from cuadrilla.link.nodes import AllowList
    from cuadrilla.monitor.run import TAIL_BYTES, RunReader

    home = Home.of_user()
    known = set(AllowList(home.nodes).nodes())
    if home.open_file.exists():
        crew = RunReader(RunDir(Path(str(home.open_crew()["run"]))), tail_bytes=TAIL_BYTES)
        crew.refresh()
        here = {machine["name"] for machine in crew.machines() if machine["here"]} - {COORDINATOR}
        known |= {node_of(name) for name in here}
    return known


def _change(*, here: bool | None = None, begun: str = "", ended: str = "") -> None:
    """One command at a time: what another one has just changed stays. Raises ResourceError, ConfigError."""
    home = Home.of_user()
    make_private(home.path)
    try:
        turn = FileLock(home.path / "paused.lock", timeout=TURN_SECONDS).acquire()
    except Timeout:
        raise ConfigError("another `cuadrilla pause` has not ended", hint="wait for it or stop it") from None
    with turn:
        nodes = home.paused_nodes
        home.pause(
            nodes=(nodes | {begun} if begun else nodes) - {ended},
            here=home.is_paused if here is None else here,
        )
