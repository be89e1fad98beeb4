"""`cuadrilla monitor`: how busy this machine is and what it hands out, or the machines of a run.

Starts without torch; reads files only.
"""

import contextlib
import json as json_format
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cuadrilla.cli.output import emit, emit_json_line, options, stdout
from cuadrilla.crew.signals import handling
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home
from cuadrilla.host.facts import read_facts
from cuadrilla.host.usage import Sampler, Usage, whole_usage_data
from cuadrilla.messages import language
from cuadrilla.monitor.jobs import OwnCrew, WorkNow, work_data
from cuadrilla.monitor.run import RunNow, RunReader, open_run, run_data
from cuadrilla.monitor.screen import (
    MachineNow,
    ScreenLine,
    ScreenStyle,
    crew_lines,
    fitted,
    machine_lines,
    nodes_lines,
    work_lines,
)
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, append_lines, require_regular

FIRST_SECONDS = 0.5
"""The processor's figure is a mean since the sample before."""
MOST_PAST = 60
LEAST_CELLS, LEAST_LINES = 40, 5
BLOCKS = "█░▁"


class _Source(Protocol):
    """What is watched: this machine, or a run."""

    def take(self) -> None: ...

    def data(self) -> dict[str, Any]: ...

    def lines(self, style: ScreenStyle) -> list[ScreenLine]: ...


def monitor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="A run folder or its run.toml: the machines of that run. Else this machine."
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=86_400, metavar="SECONDS", help="Seconds between samples.")
    ] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="One sample, then end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Each sample as a line of JSON.")] = False,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Also append each sample to this file, as JSON.")
    ] = None,
) -> None:
    """Show how busy this machine is and its crew's machines, or the machines of a run, until Ctrl-C.

    Of a crew that trains or takes runs, also what each machine does.
    On a terminal one screen, drawn again; elsewhere plain lines. Of a run it reads the folder only, running or ended.
    """
    options.json |= json
    with _ends_quietly():
        if run is not None:
            _watch(_Run(open_run(RunDir(run if run.is_dir() else run.parent))), interval, once=once, log=log)
            return
        with Sampler(folder=Path()) as sampler:
            _watch(_ThisMachine(sampler, OwnCrew(Home.of_user())), interval, once=once, log=log)


@contextlib.contextmanager
def _ends_quietly() -> Iterator[None]:
    """Ctrl-C is how one ends it. A SIGTERM is taken in the same way, so that the terminal gets its cursor back."""
    with contextlib.suppress(KeyboardInterrupt), handling({signal.SIGTERM: signal.default_int_handler}):
        yield


def _watch(source: _Source, interval: float, *, once: bool, log: Path | None) -> None:
    if log is not None:
        _check_log(log)
    console = None if options.json else _console()
    with contextlib.ExitStack() as stack:
        show: Callable[[list[ScreenLine]], None] = _print_lines
        if console is not None:
            show = _drawn_once(console) if once else stack.enter_context(_Screen(console))
        following = time.monotonic()
        while True:
            source.take()
            if log is not None:
                _append(log, source.data())
            if options.json:
                emit_json_line(source.data())
            else:
                show(source.lines(_style(console)))
            if once:
                return
            following = max(following + interval, time.monotonic())
            time.sleep(max(0.0, following - time.monotonic()))


@dataclass
class _ThisMachine:
    sampler: Sampler
    crew: OwnCrew

    def __post_init__(self) -> None:
        facts = read_facts()
        self._name, self._processor = socket.gethostname(), facts.processor or ""
        self._past: deque[Usage] = deque(maxlen=MOST_PAST)
        self._usage: Usage | None = None
        self._nodes: list[str] = []
        self._now: RunNow | WorkNow | None = None
        self._time = 0.0
        self.sampler.sample()
        time.sleep(FIRST_SECONDS)

    def take(self) -> None:
        if self._usage is not None:
            self._past.append(self._usage)
        self._usage, self._time = self.sampler.sample(), time.time()
        self._nodes = _nodes(self.crew.home)
        self._now = self.crew.read(self._nodes, now=self._time)

    def data(self) -> dict[str, Any]:
        usage = whole_usage_data(self._usage or Usage())
        found = {"time": self._time, "machine": self._name, **usage, "gpus_silent": self.sampler.gpus_silent}
        if self._nodes:
            found["nodes"] = self._nodes
        if self._now is not None:
            now = self._now
            found["hands_out"] = work_data(now) if isinstance(now, WorkNow) else {"kind": "run", **run_data(now)}
        return found

    def lines(self, style: ScreenStyle) -> list[ScreenLine]:
        machine = MachineNow(
            name=one_line(self._name),
            clock=_clock(self._time),
            processor=one_line(self._processor),
            usage=self._usage or Usage(),
            past=tuple(self._past),
            gpus_silent=self.sampler.gpus_silent,
        )
        lines = machine_lines(machine, style=style)
        if self._now is None and not self._nodes:
            return lines
        lines += [ScreenLine(text="")] if style.live else []
        rest = replace(style, height=None if style.height is None else max(1, style.height - len(lines)))
        clock = "" if style.live else machine.clock
        return fitted([*lines, *self._crew_lines(rest, clock=clock)], style=style)

    def _crew_lines(self, style: ScreenStyle, *, clock: str) -> list[ScreenLine]:
        match self._now:
            case None:
                return nodes_lines(self._nodes, style=style, clock=clock)
            case RunNow():
                return crew_lines(self._now, style=style, clock=clock)
            case WorkNow():
                return work_lines(self._now, style=style, clock=clock)


def _nodes(home: Home) -> list[str]:
    """Those that have joined the crew of this machine. Raises LinkError."""
    if not home.nodes.exists():
        return []
    from cuadrilla.link.nodes import AllowList

    return sorted(AllowList(home.nodes).nodes())


@dataclass
class _Run:
    reader: RunReader

    def __post_init__(self) -> None:
        self._crew: RunNow | None = None

    def take(self) -> None:
        self._crew = self.reader.read(now=time.time())

    def data(self) -> dict[str, Any]:
        return {} if self._crew is None else run_data(self._crew)

    def lines(self, style: ScreenStyle) -> list[ScreenLine]:
        return [] if self._crew is None else crew_lines(self._crew, style=style, clock=_clock(self._crew.time))


class _Screen:
    """A terminal's other screen, drawn again with each sample; the last one stays on the first."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False)
        self._last: list[ScreenLine] = []

    def __enter__(self) -> Callable[[list[ScreenLine]], None]:
        self._live.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._console.print(_drawn(self._last))

    def show(self, lines: list[ScreenLine]) -> None:
        self._last = lines
        self._live.update(_drawn(lines), refresh=True)


def _drawn(lines: list[ScreenLine]) -> Group:
    """As text: nothing in it is markup."""
    return Group(*(Text(line.text, style=line.style, no_wrap=True, overflow="crop") for line in lines))


def _drawn_once(console: Console) -> Callable[[list[ScreenLine]], None]:
    return lambda lines: console.print(_drawn(lines))


def _print_lines(lines: list[ScreenLine]) -> None:
    for line in lines:
        emit(line.text)


def _console() -> Console | None:
    """A terminal on which a screen can be drawn again."""
    console = Console(file=stdout(), highlight=False)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def _style(console: Console | None) -> ScreenStyle:
    if console is None:
        return ScreenStyle(language=language(), blocks=False)
    width, height = max(LEAST_CELLS, console.width), max(LEAST_LINES, console.height)
    return ScreenStyle(language=language(), width=width, height=height, blocks=_has_blocks())


def _has_blocks() -> bool:
    try:
        BLOCKS.encode(stdout().encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _check_log(path: Path) -> None:
    """Raises ConfigError: a device or a pipe would keep us waiting."""
    try:
        if path.exists():
            require_regular(path)
    except OSError as error:
        hint = "name a file to append to: --log monitor.jsonl"
        raise ConfigError("cannot write {path}: {reason}", path=path, reason=error.strerror, hint=hint) from error


def _append(path: Path, row: dict[str, Any]) -> None:
    """Raises ResourceError."""
    append_lines(path, json_format.dumps(row) + "\n")
