"""When a worker leaves its machine to its owner: work begins again by itself once it is welcome.

Invariants
* Whoever waits has left the crew in order: its units go to others at once, and it joins again when it is welcome.
* `why_wait` is pure. It turns slowly: a machine that is used must be quiet for `QUIET_SECONDS` before work goes on.
* What cannot be measured (no battery, no such counters) keeps nobody from working.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from cuadrilla.errors import ConfigError, EnvironmentProblem
from cuadrilla.home import Home
from cuadrilla.host.usage import PSUTIL_ERRORS, read_battery
from cuadrilla.log import TALK
from cuadrilla.messages import Message

BUSY_PART, QUIET_PART = 0.3, 0.15
"""Of the processor, that other programs use."""
QUIET_SECONDS = 30.0
LOOK_SECONDS = 2.0
LOW_PRIORITY = 10
"""Of `nice`: programs of usual priority get nine times as much of a core."""
LEAST_MEMORY_BYTES = 2**30


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Manners:
    """What a machine's owner asks of the work on it. `max_memory_bytes` 0: any."""

    while_idle: bool = False
    on_power: bool = False
    low_priority: bool = False
    max_memory_bytes: int = 0

    @property
    def options(self) -> list[str]:
        """For the processes that `join` starts."""
        found = [
            name
            for name, wanted in (
                ("--while-idle", self.while_idle),
                ("--on-power", self.on_power),
                ("--low-priority", self.low_priority),
            )
            if wanted
        ]
        return [*found, *(["--max-memory", str(self.max_memory_bytes)] if self.max_memory_bytes else [])]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a machine's owner does with it. `others`: part of the processor that other programs use; None: not known."""

    paused: bool
    on_battery: bool | None
    others: float | None
    quiet_seconds: float
    """For how long others have used little."""


def why_wait(manners: Manners, seen: Surroundings, *, waits: bool) -> Message | None:
    """Why not to work now; None where work is welcome. `waits`: it does not work at the moment."""
    if seen.paused:
        return Message("paused: cuadrilla unpause")
    if manners.on_power and seen.on_battery:
        return Message("on battery")
    if manners.while_idle and seen.others is not None:
        is_used = seen.quiet_seconds < QUIET_SECONDS if waits else seen.others > BUSY_PART
        if is_used:
            return Message("the machine is being used")
    return None


class Courtesy:
    """Looks around for one worker process. `root`: its process and its children are no others."""

    def __init__(self, manners: Manners, *, home: Home, root: int | None = None) -> None:
        self.manners, self._home = manners, home
        self._root = root or os.getpid()
        self._last: tuple[float, float, float] | None = None  # when, seconds of all, of ours
        self._quiet_since: float | None = None

    def wait_until_welcome(self) -> float:
        """Says once why it waits; the seconds that it took."""
        told, began = "", time.monotonic()
        while (reason := why_wait(self.manners, self._look(), waits=True)) is not None:
            if reason != told:
                log.info("waiting: %s", reason, extra=TALK)
                told = reason
            time.sleep(LOOK_SECONDS)
        if told:
            log.info("working again", extra=TALK)
        return time.monotonic() - began

    @contextmanager
    def watching(self, leave: Callable[[str], None]) -> Iterator[None]:
        """While the block runs, `leave` is called once when work is no longer welcome."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_SECONDS):
                if (reason := why_wait(self.manners, self._look(), waits=False)) is not None:
                    leave(reason)
                    return

        thread = threading.Thread(target=watch, name="courtesy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _look(self) -> Surroundings:
        others = self._others() if self.manners.while_idle else None
        now = time.monotonic()
        if others is None or others > QUIET_PART:
            self._quiet_since = None if others is not None else (self._quiet_since or now - QUIET_SECONDS)
        elif self._quiet_since is None:
            self._quiet_since = now
        quiet = 0.0 if self._quiet_since is None else now - self._quiet_since
        on_battery = read_battery()[1] if self.manners.on_power else None
        return Surroundings(paused=self._home.is_paused, on_battery=on_battery, others=others, quiet_seconds=quiet)

    def _others(self) -> float | None:
        """Part of all cores since the last look."""
        try:
            times, now = psutil.cpu_times(), time.monotonic()
            busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
            busy -= getattr(times, "nice", 0.0)  # whoever is nice is in nobody's way
            ours = 0.0 if self.manners.low_priority and os.name == "posix" else self._own_seconds()
        except PSUTIL_ERRORS:
            return None
        last, self._last = self._last, (now, busy, ours)
        if last is None or now <= last[0]:
            return None
        others: float = (busy - last[1]) - max(0.0, ours - last[2])
        return min(1.0, max(0.0, others / (now - last[0]) / (psutil.cpu_count() or 1)))

    def _own_seconds(self) -> float:
        root = psutil.Process(self._root)
        seconds = 0.0
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds


def behave(manners: Manners) -> None:
    """For the rest of this process: its priority, and its limit of memory. Raises ConfigError, EnvironmentProblem.

    A pass that does not fit fails as one does when memory is full: the worker takes half of it at a time then.
    """
    if manners.low_priority:
        if os.name == "posix":
            os.nice(LOW_PRIORITY)
        else:
            psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    if manners.max_memory_bytes:
        if manners.max_memory_bytes < LEAST_MEMORY_BYTES:
            raise ConfigError("less than 1 GiB of memory is not enough to train", hint="--max-memory 2GiB, or more")
        if not sys.platform.startswith("linux"):
            raise EnvironmentProblem(
                "a limit of memory can be kept on Linux only", hint="leave --max-memory out, or run it in a container"
            )
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (manners.max_memory_bytes, resource.RLIM_INFINITY))
