"""What the container that we are in has used of the processor and the memory that it may use.

psutil reports the host even inside a container, so this reads the files of cgroups, v2 and v1 as `host/facts.py` does.
Without a limit there is nothing to report: the machine's own figures are right. Never raises.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.host.facts import cgroup_folders, cpu_quota, parse_cgroup_paths, parse_cpu_max, parse_limit, read_text

NANOSECONDS, MICROSECONDS = 1e9, 1e6


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """The folders of our cgroup and those above it, outermost first."""

    unified: Sequence[Path]
    memory: Sequence[Path]
    cpu: Sequence[Path]
    accounts: Sequence[Path]
    """v1 keeps the used time (`cpuacct`) apart from the quota (`cpu`), in the same folders on most systems."""


def find_cgroups(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Cgroups:
    paths = parse_cgroup_paths(read_text(proc / "self" / "cgroup"))
    return Cgroups(
        unified=cgroup_folders(root, paths.get("", "/")),
        memory=cgroup_folders(root / "memory", paths.get("memory", "/")),
        cpu=cgroup_folders(root / "cpu", paths.get("cpu", "/")),
        accounts=cgroup_folders(root / "cpuacct", paths.get("cpuacct", "/")),
    )


def read_memory(groups: Cgroups) -> tuple[int, int] | None:
    """(used, limit) in bytes of the tightest limit; None without one.

    As `docker stats` has it, pages of files that the kernel would drop at once are not used.
    """
    tightest: tuple[int, int] | None = None
    for folders, limit_file, used_file, cache in (
        (groups.unified, "memory.max", "memory.current", "inactive_file"),
        (groups.memory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in folders:
            limit = parse_limit(read_text(folder / limit_file))
            if limit is None or (tightest is not None and tightest[1] <= limit):
                continue
            used = _count(read_text(folder / used_file))
            if used is not None:
                free = parse_stat(read_text(folder / "memory.stat"), cache)
                tightest = (max(0, used - (free or 0)), limit)
    return tightest


def read_cpu(groups: Cgroups) -> tuple[float, float] | None:
    """(seconds of CPU used so far, cores that may be used) of the tightest quota; None without one."""
    found: list[tuple[float, float]] = []
    for folder in groups.unified:
        quota = parse_cpu_max(read_text(folder / "cpu.max"))
        if quota is not None:
            used = parse_stat(read_text(folder / "cpu.stat"), "usage_usec")
            found += [] if used is None else [(used / MICROSECONDS, quota)]
    for folder, account in zip(groups.cpu, groups.accounts, strict=False):
        quota = cpu_quota(read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))
        if quota is not None:
            used = _count(read_text(account / "cpuacct.usage"))
            found += [] if used is None else [(used / NANOSECONDS, quota)]
    return min(found, key=lambda pair: pair[1], default=None)


def parse_stat(text: str, name: str) -> int | None:
    """One count of a file of lines `name count`."""
    found = re.search(rf"^{re.escape(name)} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _count(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
