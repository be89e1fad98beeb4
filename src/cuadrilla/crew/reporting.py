"""A thread that reports on a worker's machine, and asks its idle policy. The worker's own work never waits for it."""

import logging
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from cuadrilla.crew.idle_policy import IdlePolicy
from cuadrilla.errors import LinkError
from cuadrilla.host.facts import read_facts
from cuadrilla.host.usage import Sampler
from cuadrilla.link.base import MAX_LINES, MAX_TEXT, NodeReport, SaidLine
from cuadrilla.log import NOTE, OURS
from cuadrilla.printable import one_line
from cuadrilla.version import __version__

FIRST_SECONDS, REPORT_SECONDS = 1.0, 5.0
END_SECONDS = 1.0
"""Wait for the thread's end. It may be waiting for a driver or a dead connection, and ends after that."""


class NewestLines(logging.Handler):
    """Keeps the newest lines that this process logs during the block: warnings, and lines meant for a person."""

    def __init__(self) -> None:
        super().__init__(level=NOTE)
        self._lines: deque[SaidLine] = deque(maxlen=MAX_LINES)
        self._dropped = 0

    def __enter__(self) -> "NewestLines":
        logging.getLogger(OURS).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(OURS).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        level = "info" if record.levelno < logging.WARNING else record.levelname.lower()
        self._dropped += len(self._lines) == MAX_LINES
        text = one_line(self.format(record), most=MAX_TEXT)
        self._lines.append(SaidLine(level="error" if level == "critical" else level, text=text))

    def take(self) -> tuple[tuple[SaidLine, ...], int]:
        """The newest lines since the last call, and how many older ones were dropped."""
        assert self.lock is not None
        with self.lock:
            lines, dropped = tuple(self._lines), self._dropped
            self._lines.clear()
            self._dropped = 0
        return lines, dropped


@contextmanager
def reporting(
    send: Callable[[NodeReport], None],
    *,
    facts: Mapping[str, str],
    poll: Callable[[], NodeReport] = NodeReport,
    folder: Path | None = None,
    round_trip: Callable[[], float | None] = lambda: None,
    lines: NewestLines | None = None,
    policy: IdlePolicy | None = None,
    leave: Callable[[str], None] = lambda _reason: None,
) -> Iterator[None]:
    """While the block runs, `send` gets a report now and then: what `poll` says of the work, the disk of `folder`,
    the time that `round_trip` measures. `leave` is called once, when `policy` wants the machine back.

    The first report comes soon, so that monitors show a machine that has joined. A broken link ends the reports.
    """
    ended, sampler = threading.Event(), Sampler(folder=folder)

    def work() -> None:
        with suppress(LinkError):
            sampler.sample()  # the first sample has no rates: they count from the sample before
            wait, first_facts = FIRST_SECONDS, facts
            while not ended.wait(wait):
                if policy is not None and (reason := policy.why_wait(working=True)) is not None:
                    send(NodeReport(phase="paused"))
                    return leave(reason)
                said, dropped = lines.take() if lines is not None else ((), 0)
                report = replace(poll(), usage=sampler.sample(), lines=said, dropped=dropped, facts=first_facts)
                send(replace(report, round_trip_seconds=round_trip()))
                wait, first_facts = REPORT_SECONDS, {}

    thread = threading.Thread(target=work, name="reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_SECONDS)


def machine_facts(device: torch.device | None = None) -> dict[str, str]:
    """What this machine is, for a person. `device`: the one that it computes with."""
    machine = read_facts()
    found = {
        "processor": machine.processor or machine.machine,
        "cores": f"{machine.cores:g}",
        "system": machine.system_version or machine.system,
        "container": machine.container or "",
        "wsl": str(machine.wsl or ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuadrilla": __version__,
    }
    if device is not None:
        found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {name: value for name, value in found.items() if value}
