"""The idle policy of a worker: when it leaves its machine to its owner. Work begins again by itself.

Invariants
* A worker that waits has left the crew in order: its units go to others at once, and it joins again afterwards.
* A machine that was used must be quiet for `QUIET_SECONDS` before work goes on.
* What cannot be measured (no battery, no such counters, which programs use a GPU while we train) stops no work.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from cuadrilla.home import Home
from cuadrilla.host.facts import PSUTIL_ERRORS
from cuadrilla.host.gpus import Gpus
from cuadrilla.host.usage import read_battery
from cuadrilla.log import NOTE
from cuadrilla.messages import Message

BUSY_PART, QUIET_PART = 0.3, 0.15
"""Parts in use by other programs: more than the first of the processor stops the work, and it waits until they use no
more than the second of the processor and of every GPU."""
QUIET_SECONDS = 30.0
POLL_SECONDS = 2.0
NOT_BUSY = ("idle", "iowait", "guest", "nice")
"""Processor times that do not count as use: user time includes guests already, and nice programs yield."""
LOW_PRIORITY = 10
"""The value of `nice`: programs of usual priority get nine times as much of a core."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnerRules:
    """Conditions of a machine's owner for work on it."""

    while_idle: bool = False
    on_power: bool = False
    low_priority: bool = False


class IdlePolicy:
    """The policy of one worker process. `root`: its process; that and its children do not count as other programs."""

    def __init__(self, rules: OwnerRules, *, home: Home, root: int | None = None, gpus: Gpus | None = None) -> None:
        self.rules, self._home = rules, home
        self._root = root or os.getpid()
        self._last: tuple[float, float, float] | None = None  # time, busy seconds of all programs, and of ours
        self._used_at = float("-inf")  # a machine is quiet until it was seen to be used
        self._gpus = gpus or Gpus()

    def wait_until_idle(self, *, unless: threading.Event) -> float:
        """Wait until work may begin, and log why it waits. Return the seconds waited. Ends when `unless` is set."""
        logged, began = "", time.monotonic()
        while not unless.is_set() and (reason := self.why_wait(working=False)) is not None:
            if reason != logged:
                log.log(NOTE, "waiting: %s", reason)
                logged = reason
            unless.wait(POLL_SECONDS)
        if logged and not unless.is_set():
            log.log(NOTE, "working again")
        return time.monotonic() - began

    def why_wait(self, *, working: bool) -> Message | None:
        """Why not to work now; None where nothing is in its way. `working`: whether this process works now."""
        if self._home.is_paused:
            return Message("paused by this machine's owner; to resume: cuadrilla pause --off")
        if self.rules.on_power and read_battery().get("on_battery"):
            return Message("on battery")
        if self.rules.while_idle and self._is_used(working=working):
            return Message("the machine is being used")
        return None

    def _is_used(self, *, working: bool) -> bool:
        used, now = self._others() or 0.0, time.monotonic()
        if not working and self._root == os.getpid():  # else the use may be our own
            busy = [gpu.busy_percent or 0.0 for gpu in self._gpus.sample()]
            used = max(used, max(busy, default=0.0) / 100)
        if used > QUIET_PART:
            self._used_at = now
        return used > BUSY_PART if working else now - self._used_at < QUIET_SECONDS

    def _others(self) -> float | None:
        """Part of all cores that other programs used since the last poll; None if it is not known."""
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
        """Processor seconds of the root process and its descendants, without user time of nice ones."""
        seconds, root = 0.0, psutil.Process(self._root)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                is_nice = os.name == "posix" and process.nice() > 0
                seconds += times.system + (0.0 if is_nice else times.user)
        return seconds


def set_priority(rules: OwnerRules) -> None:
    """Set the priority of this process, and of those that it starts from now on."""
    if not rules.low_priority:
        return
    if os.name == "posix":
        os.nice(LOW_PRIORITY)
    else:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
