"""The idle policy of a worker: when it leaves its machine to its owner. Work begins again by itself.

Invariants
* A worker that waits has left the crew in order: its units go to others at once, and it joins again afterwards.
* It turns slowly: a machine that is used must be quiet for `QUIET_SECONDS` before work goes on.
* What cannot be measured (no battery, no such counters, a GPU that does not tell programs apart) stops no
  work.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import psutil

from cuadrilla.home import Home
from cuadrilla.host.facts import PSUTIL_ERRORS, read_facts
from cuadrilla.host.gpus import Gpus, others_on
from cuadrilla.host.usage import read_battery
from cuadrilla.log import TALK
from cuadrilla.messages import Message

BUSY_PART, QUIET_PART = 0.3, 0.15
"""Parts of the processor or of a GPU that other programs use."""
QUIET_SECONDS = 30.0
POLL_SECONDS = 2.0
NOT_BUSY = ("idle", "iowait", "guest", "nice")
"""Processor times that do not count: user time has that of guests already, and nice programs yield."""
LOW_PRIORITY = 10
"""The value of `nice`: programs of usual priority get nine times as much of a core."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnerRules:
    """What a machine's owner asks of the work on it."""

    while_idle: bool = False
    on_power: bool = False
    low_priority: bool = False


class IdlePolicy:
    """Decides for one worker process. `root`: its process, which is no other program, nor are its children."""

    def __init__(self, rules: OwnerRules, *, home: Home, root: int | None = None, gpus: Gpus | None = None) -> None:
        self.rules, self._home = rules, home
        self._root = root or os.getpid()
        self._last: tuple[float, float, float] | None = None  # when, seconds of all, of ours
        self._used_at = float("-inf")  # a machine is quiet until it was seen to be used
        self._gpus = gpus or Gpus()

    def close(self) -> None:
        """End a query of the GPUs that is under way. From any thread."""
        self._gpus.close()

    def wait_until_idle(self, *, unless: threading.Event | None = None) -> float:
        """Log once why work waits; return the seconds that it took. With `unless` set it ends at once."""
        logged, began = "", time.monotonic()
        while (reason := self.why_wait(working=False)) is not None:
            if unless is not None and unless.is_set():
                return time.monotonic() - began
            if reason != logged:
                log.info("waiting: %s", reason, extra=TALK)
                logged = reason
            time.sleep(POLL_SECONDS)
        if logged:
            log.info("working again", extra=TALK)
        return time.monotonic() - began

    def why_wait(self, *, working: bool) -> Message | None:
        """Why not to work now; None where nothing is in its way. `working`: whether this process works now."""
        if self._home.is_paused:
            return Message("paused: cuadrilla pause --off")
        if self.rules.on_power and read_battery()[1]:
            return Message("on battery")
        if self.rules.while_idle and self._is_used(working=working):
            return Message("the machine is being used")
        return None

    def _is_used(self, *, working: bool) -> bool:
        parts = (self._others(), self._gpu_others(working=working))
        used, now = max((part for part in parts if part is not None), default=0.0), time.monotonic()
        if used > QUIET_PART:
            self._used_at = now
        return used > BUSY_PART if working else now - self._used_at < QUIET_SECONDS

    def _gpu_others(self, *, working: bool) -> float | None:
        """Part of the GPU that other programs use most. While this one works it counts only what is known to be
        theirs; before that, all that the GPU does, unless it may be work of ours in another process.
        """
        cards = self._gpus.rows()
        if not cards:
            return None
        ours, alone = {process.pid for process in self._own()}, not working and self._root == os.getpid()
        return others_on(cards, ours=ours, told_apart=self._told_apart, all_are_others=alone)

    @cached_property
    def _told_apart(self) -> bool:
        return not read_facts().container  # where processes have their host's numbers

    def _own(self) -> list[psutil.Process]:
        """The root and what it has started."""
        with suppress(psutil.Error):
            root = psutil.Process(self._root)
            return [root, *root.children(recursive=True)]
        return [psutil.Process()]

    def _others(self) -> float | None:
        """Part of all cores since the last poll."""
        try:
            times, now = psutil.cpu_times(), time.monotonic()
            idle = sum(getattr(times, name, 0.0) for name in NOT_BUSY)
            busy, ours = sum(times) - idle, self._own_seconds()
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
    """For the rest of this process, and for those that it starts."""
    if not rules.low_priority:
        return
    if os.name == "posix":
        os.nice(LOW_PRIORITY)
    else:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
