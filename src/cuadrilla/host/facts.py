"""What this machine is: system, WSL2, container, processor, memory and the limits a container sets.

`parse_*` are pure (text in, value out) and `read_facts` is thin around them. Nothing here raises: what cannot be
found out is None. psutil reports the host even inside a container, so the limits come from cgroup files
(v2: https://docs.kernel.org/admin-guide/cgroup-v2.html, v1: memory.limit_in_bytes and cpu.cfs_quota_us).
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

# In the order in which a table shows them. arm64 calls its 128-bit vectors `asimd`; we use the common name.
INSTRUCTION_SETS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "neon")
UNLIMITED_BYTES = 1 << 60  # cgroup v1 spells "no limit" as the largest multiple of a page in 63 bits
SYSCTL_TIMEOUT_SECONDS = 5.0
PF_AVX2, PF_AVX512F = 40, 41  # winnt.h, IsProcessorFeaturePresent


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """What /proc/cpuinfo, sysctl or Windows says about the processor."""

    name: str | None = None
    physical_cores: int | None = None
    instruction_sets: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One machine. None is "unknown", except in `wsl`, `container` and the limits, where it is "none"."""

    system: str  # Linux, Darwin, Windows
    system_version: str | None  # "Ubuntu 24.04.1 LTS", "15.1", "10.0.26100"
    kernel: str | None
    machine: str | None  # x86_64, arm64, ...
    rosetta: bool  # an x86_64 Python translated on Apple silicon: torch has no wheel for it
    wsl: int | None  # 1 or 2
    container: str | None  # docker, podman, lxc, kubernetes, ...
    cpu: Cpu
    logical_cores: int | None  # that this process may run on
    cpu_quota: float | None  # cores that the container may use, e.g. 1.5
    memory_bytes: int | None
    available_bytes: int | None
    memory_limit_bytes: int | None  # set by a container
    python_version: str

    @property
    def usable_memory_bytes(self) -> int | None:
        """Memory of the machine, or of the container if that is less."""
        known = [value for value in (self.memory_bytes, self.memory_limit_bytes) if value is not None]
        return min(known, default=None)

    @property
    def usable_cores(self) -> float | None:
        """Cores this process may use: the quota if it is the smaller, else the logical cores it may run on."""
        known = [value for value in (self.logical_cores, self.cpu_quota) if value is not None]
        return min(known, default=None)


def parse_wsl(kernel: str) -> int | None:
    """1 or 2 from a kernel release: `5.15.153.1-microsoft-standard-WSL2`, `4.4.0-19041-Microsoft`."""
    lowered = kernel.lower()
    if "microsoft" not in lowered and "wsl" not in lowered:
        return None
    return 1 if re.match(r"[34]\.", lowered) and "wsl2" not in lowered and "standard" not in lowered else 2


def parse_os_release(text: str) -> str | None:
    """PRETTY_NAME of /etc/os-release."""
    match = re.search(r'^PRETTY_NAME=(["\']?)(.*?)\1\s*$', text, re.MULTILINE)
    return match[2] or None if match else None


def parse_cpuinfo(text: str) -> Cpu:
    """The processor from /proc/cpuinfo of an x86 or ARM Linux."""
    rows = [
        (key.strip().lower(), value.strip()) for key, _, value in (line.partition(":") for line in text.splitlines())
    ]
    names = [value for key, value in rows if key in ("model name", "hardware", "model") and not value.isdigit()]
    flags = {flag for key, value in rows if key in ("flags", "features") for flag in value.lower().split()}
    cores: set[tuple[str, str]] = set()
    package = "0"
    for key, value in rows:
        if key == "physical id":
            package = value
        elif key == "core id":
            cores.add((package, value))
    return Cpu(
        name=names[0] if names else None,
        physical_cores=len(cores) or None,
        instruction_sets=instruction_sets(flags) if flags else None,
    )


def instruction_sets(flags: Iterable[str]) -> tuple[str, ...]:
    """Those of a processor's flags that decide how fast it trains."""
    present = {"neon" if flag == "asimd" else flag for flag in flags}
    return tuple(name for name in INSTRUCTION_SETS if name in present)


def parse_container(
    *, environ: Mapping[str, str], cgroup: str, files: Iterable[str], init_environ: str = ""
) -> str | None:
    """The kind of container, from `container=`, /proc/1/cgroup and the marker files that runtimes leave."""
    present = set(files)
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if "/run/.containerenv" in present:
        return "podman"
    if "/.dockerenv" in present:
        return "docker"
    named = re.search(r"(?:^|\0)container=([\w-]+)", init_environ)
    declared = environ.get("container") or (named[1] if named else "")
    if declared:
        return declared
    match = re.search(r"/(docker|kubepods|lxc|podman|libpod|containerd)\b", cgroup)
    return {"kubepods": "kubernetes", "libpod": "podman"}.get(match[1], match[1]) if match else None


def parse_limit(text: str) -> int | None:
    """A cgroup memory limit in bytes; `max`, v1's huge number and garbage are no limit."""
    value = text.strip()
    if not value.isdigit():
        return None
    return int(value) if 0 < int(value) < UNLIMITED_BYTES else None


def parse_cpu_max(text: str) -> float | None:
    """Cores from cgroup v2's `cpu.max`: `150000 100000` is 1.5, `max 100000` no limit."""
    quota, _, period = text.strip().partition(" ")
    return cpu_quota(quota, period)


def cpu_quota(quota: str, period: str) -> float | None:
    """Cores from a quota and a period in microseconds; -1, `max` and garbage are no limit."""
    if not quota.strip().isdigit() or not period.strip().isdigit() or int(period) == 0 or int(quota) == 0:
        return None
    return int(quota) / int(period)


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """Controller to path from /proc/self/cgroup; v2's single hierarchy is under the empty name."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def read_text(path: Path) -> str:
    """A file's text, or nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def read_limits(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> tuple[int | None, float | None]:
    """(memory limit in bytes, CPU quota in cores): the tightest of our cgroup and those above it, v2 or v1."""
    paths = parse_cgroup_paths(read_text(proc / "self" / "cgroup"))
    memory: list[int | None] = []
    cores: list[float | None] = []
    for folder in cgroup_folders(root, paths.get("", "/")):
        memory.append(parse_limit(read_text(folder / "memory.max")))
        cores.append(parse_cpu_max(read_text(folder / "cpu.max")))
    for folder in cgroup_folders(root / "memory", paths.get("memory", "/")):
        memory.append(parse_limit(read_text(folder / "memory.limit_in_bytes")))
    for folder in cgroup_folders(root / "cpu", paths.get("cpu", "/")):
        cores.append(cpu_quota(read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")))
    return (
        min((value for value in memory if value is not None), default=None),
        min((value for value in cores if value is not None), default=None),
    )


def cgroup_folders(root: Path, path: str) -> list[Path]:
    """`root` and the folders down to `path` below it. In a container `path` may name a folder only the host has."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def _read_cpu(system: str) -> Cpu:
    if system == "Linux":
        found = parse_cpuinfo(read_text(Path("/proc/cpuinfo")))
    elif system == "Darwin":
        found = Cpu(name=_sysctl("machdep.cpu.brand_string"), instruction_sets=_darwin_sets())
    else:
        found = Cpu(name=_windows_cpu_name(), instruction_sets=_windows_sets())
    return Cpu(
        name=found.name or platform.processor() or platform.machine() or None,
        physical_cores=found.physical_cores or psutil.cpu_count(logical=False),
        instruction_sets=found.instruction_sets,
    )


def _sysctl(name: str) -> str | None:
    """One value of macOS's sysctl."""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SYSCTL_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _darwin_sets() -> tuple[str, ...]:
    if platform.machine() == "arm64":
        return ("neon",)
    return instruction_sets((_sysctl("machdep.cpu.leaf7_features") or "").lower().split())


def _windows_cpu_name() -> str | None:
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        except OSError:
            pass
    return None


def _windows_sets() -> tuple[str, ...] | None:
    if sys.platform == "win32":
        import ctypes

        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        flags = [name for name, number in (("avx2", PF_AVX2), ("avx512f", PF_AVX512F)) if present(number)]
        return instruction_sets([*flags, *(["neon"] if platform.machine().lower() == "arm64" else [])])
    return None


def _logical_cores() -> int | None:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    else:
        return os.cpu_count()


def _system_version(system: str) -> str | None:
    if system == "Linux":
        return parse_os_release(read_text(Path("/etc/os-release")))
    return (platform.mac_ver()[0] if system == "Darwin" else platform.version()) or None


def _read_memory() -> tuple[int | None, int | None]:
    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, ValueError, KeyError, psutil.Error):
        return None, None  # psutil raises what it meets when /proc is not mounted or lacks a line
    return memory.total, memory.available


def read_facts() -> Facts:
    """This machine, now. Never raises."""
    system = platform.system()
    linux = system == "Linux"
    total, available = _read_memory()
    limit, quota = read_limits() if linux else (None, None)
    kernel = platform.release() or None
    container = parse_container(
        environ=os.environ,
        cgroup=read_text(Path("/proc/1/cgroup")),
        files=[path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)],
        init_environ=read_text(Path("/proc/1/environ")),
    )
    return Facts(
        system=system,
        system_version=_system_version(system),
        kernel=kernel,
        machine=platform.machine() or None,
        rosetta=system == "Darwin" and _sysctl("sysctl.proc_translated") == "1",
        wsl=parse_wsl(kernel or "") if linux else None,
        container=container if linux else None,
        cpu=_read_cpu(system),
        logical_cores=_logical_cores(),
        cpu_quota=quota,
        memory_bytes=total,
        available_bytes=available if limit is None or available is None else min(available, limit),
        memory_limit_bytes=limit if limit is not None and (total is None or limit < total) else None,
        python_version=platform.python_version(),
    )
