"""The idle policy of a worker: when it leaves its machine to its owner. Work begins again by itself.

Invariants
* A worker that waits has left the crew in order: its units go to others at once, and it joins again afterwards.
* `why_wait` is pure. It turns slowly: a machine that is used must be quiet for `QUIET_SECONDS` before work goes on.
* What cannot be measured (no battery, no such counters, a GPU that does not tell programs apart) keeps nobody from
  working; of a GPU it is said once.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import psutil

from cuadrilla.home import Home
from cuadrilla.host.facts import read_facts
from cuadrilla.host.gpus import Gpus, others_on
from cuadrilla.host.usage import PSUTIL_ERRORS, read_battery
from cuadrilla.log import TALK
from cuadrilla.messages import Message

BUSY_PART, QUIET_PART = 0.3, 0.15
"""Of the processor or of a GPU, that other programs use."""
QUIET_SECONDS = 30.0
LOOK_SECONDS = 2.0
LOW_PRIORITY = 10
"""Of `nice`: programs of usual priority get nine times as much of a core."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnerRules:
    """What a machine's owner asks of the work on it."""

    while_idle: bool = False
    on_power: bool = False
    low_priority: bool = False

    @property
    def options(self) -> list[str]:
        """For the processes that `join` starts."""
        return [f"--{name.replace('_', '-')}" for name, wanted in asdict(self).items() if wanted]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a machine's owner does with it. `used`: part of the processor or of a GPU, of what other programs use most;
    None: not known. `quiet_seconds`: for how long that has been little.
    """

    paused: bool
    on_battery: bool | None
    used: float | None
    quiet_seconds: float


def why_wait(rules: OwnerRules, seen: Surroundings, *, waits: bool) -> Message | None:
    """Why not to work now; None where nothing is in its way. `waits`: it does not work at the moment."""
    if seen.paused:
        return Message("paused: cuadrilla pause --off")
    if rules.on_power and seen.on_battery:
        return Message("on battery")
    if rules.while_idle and seen.used is not None:
        is_used = seen.quiet_seconds < QUIET_SECONDS if waits else seen.used > BUSY_PART
        if is_used:
            return Message("the machine is being used")
    return None


class IdlePolicy:
    """Looks around for one worker process. `root`: its process and its children are no others."""

    def __init__(self, rules: OwnerRules, *, home: Home, root: int | None = None, gpus: Gpus | None = None) -> None:
        self.rules, self._home = rules, home
        self._root = root or os.getpid()
        self._last: tuple[float, float, float] | None = None  # when, seconds of all, of ours
        self._quiet_since = float("-inf")  # a machine is quiet until it was seen to be used
        self._gpus = gpus or Gpus()
        self._told_apart: bool | None = None
        self._told_of_gpus = False

    def close(self) -> None:
        """From any thread: whoever looks at a GPU just now goes on at once."""
        self._gpus.close()

    def wait_until_idle(self, *, unless: threading.Event | None = None) -> float:
        """Says once why it waits; the seconds that it took. With `unless` set it ends at once."""
        told, began = "", time.monotonic()
        while (reason := why_wait(self.rules, self._look(works=False), waits=True)) is not None:
            if unless is not None and unless.is_set():
                return time.monotonic() - began
            if reason != told:
                log.info("waiting: %s", reason, extra=TALK)
                told = reason
            time.sleep(LOOK_SECONDS)
        if told:
            log.info("working again", extra=TALK)
        return time.monotonic() - began

    @contextmanager
    def watching(self, leave: Callable[[str], None]) -> Iterator[None]:
        """While the block runs, `leave` is called once when the policy asks for it."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_SECONDS):
                if (reason := why_wait(self.rules, self._look(works=True), waits=False)) is not None:
                    leave(reason)
                    return

        thread = threading.Thread(target=watch, name="idle-policy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self.close()  # a driver that hangs is not waited for
            thread.join()

    def _look(self, *, works: bool) -> Surroundings:
        parts = (self._others(), self._gpu_others(works=works)) if self.rules.while_idle else ()
        used, now = max((part for part in parts if part is not None), default=None), time.monotonic()
        if used is None:
            self._quiet_since = float("-inf")
        else:
            self._quiet_since = float("inf") if used > QUIET_PART else min(self._quiet_since, now)
        return Surroundings(
            paused=self._home.is_paused,
            on_battery=read_battery()[1] if self.rules.on_power else None,
            used=used,
            quiet_seconds=max(0.0, now - self._quiet_since),
        )

    def _gpu_others(self, *, works: bool) -> float | None:
        """Part of the GPU that other programs use most. While this one works it counts only what is known to be
        theirs; before that, all that the GPU does, unless it may be work of ours in another process.
        """
        cards = self._gpus.uses()
        if not cards:
            return None
        if self._told_apart is None:
            self._told_apart = not read_facts().container  # there the numbers of processes are its host's
        alone, ours = not works and self._root == os.getpid(), {process.pid for process in self._own()}
        found = others_on(cards, ours=ours, told_apart=self._told_apart, all_are_others=alone)
        if works and found is None and not self._told_of_gpus:
            self._told_of_gpus = True
            log.info(
                "--while-idle: which programs use the GPU is not told here, so that it does not count while this one "
                "works",
                extra=TALK,
            )
        return found

    def _own(self) -> list[psutil.Process]:
        """The root and what it has started."""
        with suppress(psutil.Error):
            root = psutil.Process(self._root)
            return [root, *root.children(recursive=True)]
        return [psutil.Process()]

    def _others(self) -> float | None:
        """Part of all cores since the last look."""
        try:
            times, now = psutil.cpu_times(), time.monotonic()
            busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
            busy -= getattr(times, "nice", 0.0)  # whoever is nice is in nobody's way
            ours = self._own_seconds()
        except PSUTIL_ERRORS:
            return None
        last, self._last = self._last, (now, busy, ours)
        if last is None or now <= last[0]:
            return None
        others: float = (busy - last[1]) - max(0.0, ours - last[2])
        return min(1.0, max(0.0, others / (now - last[0]) / (psutil.cpu_count() or 1)))

    def _own_seconds(self) -> float:
        """Beside what is counted as nice: Ray's workers are."""
        seconds = 0.0
        for process in self._own():
            with suppress(psutil.Error):
                times = process.cpu_times()
                is_nice = os.name == "posix" and process.nice() > 0
                seconds += times.system + (0.0 if is_nice else times.user)
        return seconds


def set_priority(rules: OwnerRules) -> None:
    """For the rest of this process."""
    if not rules.low_priority:
        return
    if os.name == "posix":
        os.nice(LOW_PRIORITY)
    else:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
