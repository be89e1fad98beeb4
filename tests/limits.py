"""Control groups that divide this machine's CPU between simulated machines; none can use the share of another."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 100_000


@dataclass(frozen=True)
class Share:
    """A control group. What is started with `prefix` gets no more CPU time than `limit` allows."""

    folder: Path

    @property
    def prefix(self) -> tuple[str, ...]:
        """Goes before `ip netns exec`, since /sys/fs/cgroup cannot be seen in a network namespace."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def processes(self) -> list[int]:
        return [int(number) for number in (self.folder / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """Kill the processes that still run in the group, and remove it."""
        while numbers := self.processes():
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.02)
        self.folder.rmdir()

    def limit(self, cores: float) -> None:
        quota = str(round(cores * PERIOD_MICROSECONDS))
        if (self.folder / "cpu.max").exists():  # version 2
            (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (self.folder / "cpu.cfs_quota_us").write_text(quota)


def root_of_shares() -> Path | None:
    """The folder for groups with a CPU quota, in either version of control groups; None if no group can be made."""
    if (CGROUP / "cpu" / "cpu.cfs_quota_us").exists():
        return CGROUP / "cpu"
    return CGROUP if shared("cpu") else None


@contextmanager
def shares(number: int) -> Iterator[list[Share]]:
    """Make control groups that have no limit yet. What still runs in them at the end is killed. Raises OSError."""
    root = root_of_shares()
    if root is None:
        raise FileNotFoundError("the cpu controller of control groups (version 1, or in cgroup.subtree_control)")
    made = [Share(root / f"cua-{os.getpid()}-{index}") for index in range(1, number + 1)]
    try:
        for share in made:
            share.folder.mkdir()
        yield made
    finally:
        for share in made:
            if share.folder.exists():
                share.close()


def shared(controller: str) -> bool:
    """Whether control groups of version 2 have this controller."""
    listed = CGROUP / "cgroup.subtree_control"
    return listed.exists() and controller in listed.read_text().split()
