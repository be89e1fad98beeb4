"""Shares of this machine's processor, as control groups: machines that cannot lend each other theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import getpid
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 100_000


@dataclass(frozen=True)
class Share:
    """A control group: what is started with `prefix` gets no more of the processor than `limit` says."""

    folder: Path

    @property
    def prefix(self) -> tuple[str, ...]:
        """To be put before `ip netns exec`, inside of which /sys/fs/cgroup cannot be seen."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def limit(self, cores: float) -> None:
        quota = str(round(cores * PERIOD_MICROSECONDS))
        if (self.folder / "cpu.max").exists():  # version 2
            (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (self.folder / "cpu.cfs_quota_us").write_text(quota)


def root_of_shares() -> Path | None:
    """Where groups with a share of the processor can be made, in either version of control groups."""
    if (CGROUP / "cpu" / "cpu.cfs_quota_us").exists():
        return CGROUP / "cpu"
    return CGROUP if "cpu" in _text(CGROUP / "cgroup.subtree_control").split() else None


@contextmanager
def shares(number: int) -> Iterator[list[Share]]:
    """Control groups without a limit yet. What was started in them must have ended at the end. Raises OSError."""
    root = root_of_shares()
    if root is None:
        raise FileNotFoundError("the cpu controller of control groups (version 1, or in cgroup.subtree_control)")
    made = [Share(root / f"cua-{getpid()}-{index}") for index in range(1, number + 1)]
    try:
        for share in made:
            share.folder.mkdir()
        yield made
    finally:
        for share in made:
            if share.folder.exists():
                share.folder.rmdir()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
