"""When a worker leaves its machine to its owner: work begins again by itself once it is welcome.

Invariants
* Whoever waits has left the crew in order: its units go to others at once, and it joins again when it is welcome.
* `why_wait` is pure. It turns slowly: a machine that is used must be quiet for `QUIET_SECONDS` before work goes on.
* What cannot be measured (no battery, no such counters, a GPU that does not tell programs apart) keeps nobody from
  working; of a GPU it is said once.
* A limit of memory is the kernel's on Linux. Elsewhere no process can set one that holds: a worker looks at its own
  memory, and one that has more leaves the crew in order and ends.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import psutil

from cuadrilla.errors import ConfigError, EnvironmentProblem, ResourceError
from cuadrilla.home import Home
from cuadrilla.host.gpu_users import GpuWatch, others_on, sees_all_programs
from cuadrilla.host.torchrun import find_place
from cuadrilla.host.usage import PSUTIL_ERRORS, read_battery
from cuadrilla.log import TALK
from cuadrilla.messages import Message

BUSY_PART, QUIET_PART = 0.3, 0.15
"""Of the processor or of a GPU, that other programs use."""
QUIET_SECONDS = 30.0
LOOK_SECONDS = 2.0
LOW_PRIORITY = 10
"""Of `nice`: programs of usual priority get nine times as much of a core."""
LEAST_MEMORY_BYTES = 2**30
MEMORY_SECONDS, FAMILY_SECONDS = 0.5, 5.0
"""To look for children costs several milliseconds on a machine with many processes."""
KERNEL_LIMITS_MEMORY = sys.platform.startswith("linux")
"""macOS has RLIMIT_DATA and RLIMIT_AS and keeps neither; Windows has none for a process by itself."""


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
    """What a machine's owner does with it. `others`: part of the processor that other programs use; None: not known.
    `gpu_others`: of the GPU of which they use most.
    """

    paused: bool
    on_battery: bool | None
    others: float | None
    gpu_others: float | None = None
    quiet_seconds: float
    """For how long others have used little."""

    @property
    def used(self) -> float | None:
        """By others, of what they use most; None where nothing is known."""
        return max((part for part in (self.others, self.gpu_others) if part is not None), default=None)


def why_wait(manners: Manners, seen: Surroundings, *, waits: bool) -> Message | None:
    """Why not to work now; None where work is welcome. `waits`: it does not work at the moment."""
    if seen.paused:
        return Message("paused: cuadrilla unpause")
    if manners.on_power and seen.on_battery:
        return Message("on battery")
    if manners.while_idle and seen.used is not None:
        is_used = seen.quiet_seconds < QUIET_SECONDS if waits else seen.used > BUSY_PART
        if is_used:
            return Message("the machine is being used")
    return None


class Courtesy:
    """Looks around for one worker process. `root`: its process and its children are no others. `gpus`: how to look at
    the GPUs; `kernel_limits_memory`: somebody else sees to that limit.
    """

    def __init__(
        self,
        manners: Manners,
        *,
        home: Home,
        root: int | None = None,
        gpus: GpuWatch | None = None,
        kernel_limits_memory: bool = KERNEL_LIMITS_MEMORY,
    ) -> None:
        self.manners, self._home = manners, home
        self._root = root or os.getpid()
        self._last: tuple[float, float, float] | None = None  # when, seconds of all, of ours
        self._quiet_since = float("-inf")  # a machine is quiet until it was seen to be used
        self._gpus = gpus or GpuWatch()
        self._told_apart: bool | None = None
        self._told_of_gpus = self._told_of_memory = False
        self._watched_bytes = 0 if kernel_limits_memory else manners.max_memory_bytes
        self._too_much: ResourceError | None = None
        self._family: list[psutil.Process] = []
        self._family_until = 0.0

    @classmethod
    def from_data(cls, data: Mapping[str, Any], *, home: Home) -> "Courtesy":
        """Of another process of this machine, as `data` has put it."""
        asked = {each.name: data[each.name] for each in fields(Manners) if each.name in data}
        return cls(Manners(**asked), home=home, root=data.get("root"))

    def data(self) -> dict[str, Any]:
        """For the processes that work in the place of this one."""
        return {**asdict(self.manners), "root": self._root}

    def close(self) -> None:
        """From any thread: whoever looks at a GPU just now goes on at once."""
        self._gpus.close()

    def wait_until_welcome(self, *, unless: threading.Event | None = None) -> float:
        """Says once why it waits; the seconds that it took. `unless` this is set: then nobody wants to work any more.

        Raises ResourceError when it had to leave for good.
        """
        if self._too_much is not None:
            raise self._too_much
        told, began = "", time.monotonic()
        while (reason := why_wait(self.manners, self._look(works=False), waits=True)) is not None:
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
        """While the block runs, `leave` is called once when work is no longer welcome."""
        if self._watched_bytes and not self._told_of_memory:
            self._told_of_memory = True
            log.info(
                "--max-memory: this system keeps no such limit; this process looks at its own memory, and leaves the "
                "crew when it has more",
                extra=TALK,
            )
        ended = threading.Event()

        def watch() -> None:
            due = time.monotonic() + LOOK_SECONDS
            while not ended.wait(min(LOOK_SECONDS, MEMORY_SECONDS) if self._watched_bytes else LOOK_SECONDS):
                reason: str | None = self._why_leave_for_good()
                if reason is None and time.monotonic() >= due:
                    reason = why_wait(self.manners, self._look(works=True), waits=False)
                    due = time.monotonic() + LOOK_SECONDS
                if reason is not None:
                    leave(reason)
                    return

        thread = threading.Thread(target=watch, name="courtesy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self.close()  # a driver that hangs is not waited for
            thread.join()

    def _look(self, *, works: bool) -> Surroundings:
        idle = self.manners.while_idle
        seen = Surroundings(
            paused=self._home.is_paused,
            on_battery=read_battery()[1] if self.manners.on_power else None,
            others=self._others() if idle else None,
            gpu_others=self._gpu_others(works=works) if idle else None,
            quiet_seconds=0.0,
        )
        now = time.monotonic()
        if seen.used is None:
            self._quiet_since = float("-inf")
        elif seen.used > QUIET_PART:
            self._quiet_since = float("inf")
        elif self._quiet_since > now:
            self._quiet_since = now
        return replace(seen, quiet_seconds=max(0.0, now - self._quiet_since))

    def _why_leave_for_good(self) -> str | None:
        if not self._watched_bytes:
            return None
        if time.monotonic() >= self._family_until:
            self._family, self._family_until = family_here(), time.monotonic() + FAMILY_SECONDS
        used = memory_of(self._family)
        if used <= self._watched_bytes:
            return None
        told = {"used": f"{used / 2**30:.1f}", "most": f"{self._watched_bytes / 2**30:.1f}"}
        self._too_much = ResourceError(
            "this worker has {used} GiB of memory, more than --max-memory {most}GiB",
            hint="a smaller train.pass_sequences, or more memory for it",
            **told,
        )
        return Message("it has {used} GiB of memory, more than its owner allows", used=told["used"])

    def _gpu_others(self, *, works: bool) -> float | None:
        """Part of the GPU that other programs use most. While this one works it counts only what is known to be
        theirs; before that, all that the GPU does, unless it may be work of ours in another process.
        """
        cards = self._gpus.look(works=works)
        if not cards:
            return None
        if self._told_apart is None:
            self._told_apart = sees_all_programs()
        alone = not works and self._root == os.getpid()
        found = others_on(cards, ours=self._own_processes(), told_apart=self._told_apart, all_are_others=alone)
        if works and found is None and not self._told_of_gpus:
            self._told_of_gpus = True
            log.info(
                "--while-idle: which programs use the GPU is not told here, so that it does not count while this one "
                "works",
                extra=TALK,
            )
        return found

    def _own_processes(self) -> set[int]:
        with suppress(psutil.Error):
            return {self._root, *(process.pid for process in psutil.Process(self._root).children(recursive=True))}
        return {self._root, os.getpid()}

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
        root = psutil.Process(self._root)
        seconds = 0.0
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                is_nice = os.name == "posix" and process.nice() > 0
                seconds += times.system + (0.0 if is_nice else times.user)
        return seconds


def family_here() -> list[psutil.Process]:
    """This process and its children."""
    here = psutil.Process()
    with suppress(psutil.Error):
        return [here, *here.children(recursive=True)]
    return [here]


def memory_of(processes: Iterable[psutil.Process]) -> int:
    """What they have allocated of their own where the system tells (Windows), else what of it is in memory."""
    found = 0
    for each in processes:
        with suppress(psutil.Error):
            info = each.memory_info()
            found += int(getattr(info, "private", info.rss))
    return found


def behave(manners: Manners) -> None:
    """For the rest of this process: its priority, and its limit of memory where the kernel keeps one. Raises
    ConfigError, EnvironmentProblem.

    A pass that does not fit then fails as one does when memory is full: the worker takes half of it at a time.
    """
    if manners.low_priority:
        if os.name == "posix":
            os.nice(LOW_PRIORITY)
        else:
            psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    if manners.max_memory_bytes:
        if manners.max_memory_bytes < LEAST_MEMORY_BYTES:
            raise ConfigError("less than 1 GiB of memory is not enough to train", hint="--max-memory 2GiB, or more")
        if not KERNEL_LIMITS_MEMORY and find_place() is not None:
            raise EnvironmentProblem(
                "under torchrun a limit of memory is kept on Linux only",
                hint="leave --max-memory out, or join without torchrun",
            )
        if sys.platform.startswith("linux"):
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (manners.max_memory_bytes, resource.RLIM_INFINITY))
