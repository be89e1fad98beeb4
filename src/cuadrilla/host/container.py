"""How much memory and processor this process's container may use, and how much it uses.

psutil reports the host even inside a container, so this reads the files of cgroups (v2:
https://docs.kernel.org/admin-guide/cgroup-v2.html, v1: memory.limit_in_bytes and cpu.cfs_quota_us). The tightest limit
of our cgroup and its parents holds. Without a limit the machine's own figures are right.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class Cgroups:
    """The place of the system's cgroup files. In a container our cgroup's path may name a folder of the host only."""

    root: Path = Path("/sys/fs/cgroup")
    proc: Path = Path("/proc")

    def folders(self, controller: str = "") -> list[Path]:
        """Folders of our cgroup and its parents, outermost first. `controller` is "" for v2's single hierarchy."""
        rows = (line.split(":", 2) for line in read_text(self.proc / "self" / "cgroup").splitlines())
        path = next((row[2] for row in rows if len(row) == 3 and controller in row[1].split(",")), "/")
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        return [(self.root / controller).joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def read_text(path: Path) -> str:
    """A file's text, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def read_memory(groups: Cgroups) -> tuple[int, int]:
    """(used, all) in bytes: of the container if it has a limit, else of the machine.

    As in `docker stats`, file pages that the kernel would drop at once do not count as used.
    """
    machine = psutil.virtual_memory()
    found = [(machine.total - machine.available, machine.total)]
    for controller, limit_file, used_file, cache in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in groups.folders(controller):
            limit, used = _number(read_text(folder / limit_file)), _number(read_text(folder / used_file))
            if limit and used is not None:  # v1's "no limit" is a number beyond any memory
                found.append((max(0, used - (_stat(folder / "memory.stat", cache) or 0)), limit))
    return min(found, key=lambda pair: pair[1])


def read_cpu(groups: Cgroups) -> tuple[float, float] | None:
    """(seconds of CPU used so far, cores that may be used); None without a quota."""
    found: list[tuple[float, float]] = []
    for folder in groups.folders():
        quota, microseconds = _quota(read_text(folder / "cpu.max")), _stat(folder / "cpu.stat", "usage_usec")
        if quota is not None and microseconds is not None:
            found.append((microseconds / 1e6, quota))
    for folder, account in zip(groups.folders("cpu"), groups.folders("cpuacct"), strict=False):
        quota = _quota(f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}")
        nanoseconds = _number(read_text(account / "cpuacct.usage"))
        if quota is not None and nanoseconds is not None:
            found.append((nanoseconds / 1e9, quota))
    return min(found, key=lambda pair: pair[1], default=None)


def _quota(text: str) -> float | None:
    """Cores from a quota and a period in microseconds: `150000 100000` is 1.5; `max`, -1 and garbage are no limit."""
    found = re.fullmatch(r"([1-9]\d*)\s+([1-9]\d*)", text.strip())
    return int(found[1]) / int(found[2]) if found else None


def _stat(file: Path, name: str) -> int | None:
    """The count of `name` in a file with lines `name count`."""
    found = re.search(rf"^{name} (\d+)$", read_text(file), re.MULTILINE)
    return int(found[1]) if found else None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
