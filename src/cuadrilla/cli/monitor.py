"""`cuadrilla monitor`: how busy this machine is and what its crew does, or the machines of a run.

Starts without torch; reads files only.
"""

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from cuadrilla.cli.config import folder_of
from cuadrilla.cli.output import answered, emit_drawn, options, stdout
from cuadrilla.crew.signals import handling
from cuadrilla.home import Home
from cuadrilla.host.facts import read_facts
from cuadrilla.host.usage import Sampler
from cuadrilla.link.nodes import AllowList
from cuadrilla.monitor.run import RUNNING, TAIL_BYTES, open_run
from cuadrilla.monitor.screen import machine_screen, run_screen
from cuadrilla.rundir import read_object

FIRST_SECONDS = 0.5
"""Between the first two samples: the processor's figure is a mean since the previous sample."""


Data = dict[str, Any]


def monitor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="A run folder or its run.toml: the machines of that run. Else this machine."
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="Seconds between samples.")
    ] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="One sample, then end.")] = False,
) -> None:
    """Show how busy this machine is and its crew's machines, or the machines of a run, until Ctrl-C.

    Of a crew that trains or takes runs, also what each machine does.
    On a terminal one screen, drawn again; elsewhere plain lines. Of a run it reads the folder only, running or ended.
    """
    # Ctrl-C ends this command. SIGTERM is handled in the same way, so that the terminal gets its cursor back.
    with contextlib.suppress(KeyboardInterrupt), handling({signal.SIGTERM: signal.default_int_handler}):
        if run is not None:
            reader = open_run(folder_of(run).path, tail_bytes=TAIL_BYTES)
            _watch(lambda: reader.data(now=time.time()), run_screen, interval, once=once)
            return
        _watch(_ThisMachine().data, machine_screen, interval, once=once)


def _watch(read: Callable[[], Data], draw: Callable[..., RenderableType], interval: float, *, once: bool) -> None:
    console = Console(file=stdout(), highlight=False)
    is_drawn = console.is_terminal and not console.is_dumb_terminal and not options.json
    live = Live(console=console, auto_refresh=False, redirect_stdout=False) if is_drawn and not once else None
    with live or contextlib.nullcontext():
        following = time.monotonic()
        while True:
            now = read()
            clock = time.strftime("%H:%M:%S", time.localtime(now["time"]))
            screen = draw(now, clock=clock, width=console.width if is_drawn else None)
            if live is not None:
                live.update(screen, refresh=True)
            elif not answered(now, indent=None):  # one line for each sample
                emit_drawn(screen)
            if once:
                return
            following = max(following + interval, time.monotonic())
            time.sleep(max(0.0, following - time.monotonic()))


class _ThisMachine:
    """Reads the usage of this machine, and the crew that it coordinates."""

    def __init__(self) -> None:
        self._sampler, self._home = Sampler(folder=Path()), Home.of_user()
        self._name, self._processor = socket.gethostname(), read_facts().processor or ""
        self._open = lru_cache(1)(partial(open_run, tail_bytes=TAIL_BYTES))
        self._sampler.sample()
        time.sleep(FIRST_SECONDS)

    def data(self) -> Data:
        """The data of one sample. Raises LinkError if the list of nodes is damaged."""
        usage, now = asdict(self._sampler.sample()), time.time()
        found = {"time": now, "machine": self._name, "processor": self._processor, **usage}
        found["gpus_silent"] = self._sampler.gpus.is_silent
        nodes = sorted(AllowList(self._home.nodes).nodes())
        crew = self._crew(nodes, now=now)
        return found | ({"nodes": nodes} if nodes else {}) | ({"crew": crew} if crew else {})

    def _crew(self, nodes: list[str], *, now: float) -> Data | None:
        """The crew's run with all its nodes, absent ones too; None if nothing runs."""
        folder = read_object(self._home.open_file).get("run")
        found = {} if folder is None else self._open(Path(folder)).data(now=now, nodes=nodes)
        return found if found.get("state") == RUNNING else None
