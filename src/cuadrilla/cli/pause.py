"""Work for others that leaves a machine to its owner: options of `join`, and the verbs `pause` and `unpause`."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home
from cuadrilla.rundir import FolderLock, RunDir, make_private

if TYPE_CHECKING:
    from cuadrilla.engines.courtesy import Manners

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
TURN_SECONDS, TURN_LOOK_SECONDS = 10.0, 0.02
MOST_BYTES = 2**60
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
WhileIdle = Annotated[
    bool,
    typer.Option(
        "--while-idle",
        help="Work only while other programs use little of the processor and of the GPU, as far as that is told.",
    ),
]
OnPower = Annotated[bool, typer.Option("--on-power", help="Work only while the machine is not on battery.")]
LowPriority = Annotated[bool, typer.Option("--low-priority", help="Other programs go first.")]
MaxMemory = Annotated[
    str,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Memory that each worker may use, such as 4GiB. Where the system keeps no such limit (macOS, Windows), a "
        "worker that has more leaves the crew and ends.",
    ),
]
Name = Annotated[
    str | None,
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
    num_bytes = float(found[1]) * 2 ** UNITS[found[2].upper()] if found is not None else 0.0
    if not 1 <= num_bytes <= MOST_BYTES:
        raise ConfigError("{text!r} is not a size", text=text[:80], hint="such as 4GiB")
    return int(num_bytes)


def pause(name: Name = None) -> None:
    """Let a machine wait: its work goes to the others until `cuadrilla unpause`."""
    if name is None:
        _change(here=True)
        say("work for others waits on this machine; it goes on after: cuadrilla unpause")
        return
    if name not in (known := _known_nodes()):
        raise ConfigError(
            "no node is named {name!r}",
            name=name[:80],
            hint="in this crew: {names}",
            names=", ".join(sorted(known)) or "-",
        )
    _change(begun=name)
    say("{name} waits; it works again after: cuadrilla unpause {name}", name=name)


def unpause(name: Name = None) -> None:
    """End what `cuadrilla pause` began."""
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
    """Of this machine's crew: who may come, and whoever works for its run now, through Ray for example."""
    from cuadrilla.link.names import COORDINATOR, node_of
    from cuadrilla.link.nodes import AllowList
    from cuadrilla.monitor.crew import CrewReader

    home = Home.of_user()
    known = set(AllowList(home.nodes).nodes())
    if home.open_file.exists():
        crew = CrewReader(RunDir(Path(str(home.open_crew()["run"])))).read(now=time.time())
        known |= {node_of(member.name) for member in crew.members if member.here and member.name != COORDINATOR}
    return known


def _change(*, here: bool | None = None, begun: str = "", ended: str = "") -> None:
    """One command at a time: what another one has just changed stays. Raises ResourceError, ConfigError."""
    home = Home.of_user()
    make_private(home.path)
    with _turn(home):
        nodes = home.paused_nodes
        home.pause(
            nodes=(nodes | {begun} if begun else nodes) - {ended},
            here=home.is_paused if here is None else here,
        )


@contextmanager
def _turn(home: Home) -> Iterator[None]:
    """Raises ConfigError when another command holds it for long."""
    deadline = time.monotonic() + TURN_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(FolderLock(home.path / "paused.lock", purpose="cuadrilla pause"))
                break
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(TURN_LOOK_SECONDS)
        yield
