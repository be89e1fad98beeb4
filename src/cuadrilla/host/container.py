"""What the container that we are in may use of the memory and the processor, and has used.

psutil reports the host even inside a container, so this reads the files of cgroups (v2:
https://docs.kernel.org/admin-guide/cgroup-v2.html, v1: memory.limit_in_bytes and cpu.cfs_quota_us): the tightest limit
of our group and those above it. Without a limit there is nothing to report: the machine's own figures are right. Never
raises.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NANOSECONDS, MICROSECONDS = 1e9, 1e6
UNLIMITED_BYTES = 1 << 60  # cgroup v1 spells "no limit" as the largest multiple of a page in 63 bits


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """The folders of our cgroup and those above it, outermost first."""

    unified: Sequence[Path]
    memory: Sequence[Path]
    cpu: Sequence[Path]
    accounts: Sequence[Path]
    """v1 keeps the used time (`cpuacct`) apart from the quota (`cpu`), in the same folders on most systems."""


def read_text(path: Path) -> str:
    """A file's text, or nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def find_cgroups(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Cgroups:
    """Of this process. In a container its path may name a folder that only the host has."""
    paths: dict[str, str] = {}
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths |= dict.fromkeys(controllers.split(","), path)  # v2's single hierarchy has no name

    def folders(top: Path, controller: str) -> list[Path]:
        parts = [part for part in PurePosixPath(paths.get(controller, "/")).parts if part not in ("/", "..")]
        return [top.joinpath(*parts[:count]) for count in range(len(parts) + 1)]

    return Cgroups(
        unified=folders(root, ""),
        memory=folders(root / "memory", "memory"),
        cpu=folders(root / "cpu", "cpu"),
        accounts=folders(root / "cpuacct", "cpuacct"),
    )


def read_memory(groups: Cgroups) -> tuple[int, int] | None:
    """(used, limit) in bytes; None without a limit.

    As `docker stats` has it, pages of files that the kernel would drop at once are not used.
    """
    found = []
    for folders, limit_file, used_file, cache in (
        (groups.unified, "memory.max", "memory.current", "inactive_file"),
        (groups.memory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in folders:
            limit, used = _number(read_text(folder / limit_file)), _number(read_text(folder / used_file))
            if limit is not None and used is not None and 0 < limit < UNLIMITED_BYTES:
                found.append((max(0, used - (parse_stat(read_text(folder / "memory.stat"), cache) or 0)), limit))
    return min(found, key=lambda pair: pair[1], default=None)


def read_cpu(groups: Cgroups) -> tuple[float, float] | None:
    """(seconds of CPU used so far, cores that may be used); None without a quota."""
    found: list[tuple[float, float]] = []
    for folder in groups.unified:
        quota, used = (
            parse_quota(read_text(folder / "cpu.max")),
            parse_stat(read_text(folder / "cpu.stat"), "usage_usec"),
        )
        if quota is not None and used is not None:
            found.append((used / MICROSECONDS, quota))
    for folder, account in zip(groups.cpu, groups.accounts, strict=False):
        quota = parse_quota(f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}")
        used = _number(read_text(account / "cpuacct.usage"))
        if quota is not None and used is not None:
            found.append((used / NANOSECONDS, quota))
    return min(found, key=lambda pair: pair[1], default=None)


def parse_quota(text: str) -> float | None:
    """Cores from a quota and a period in microseconds: `150000 100000` is 1.5; `max`, -1 and garbage are no limit."""
    found = re.fullmatch(r"([1-9]\d*)\s+([1-9]\d*)", text.strip())
    return int(found[1]) / int(found[2]) if found else None


def parse_stat(text: str, name: str) -> int | None:
    """One count of a file of lines `name count`."""
    found = re.search(rf"^{re.escape(name)} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
