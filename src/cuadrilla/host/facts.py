"""What this machine is: system, WSL2, container, processor, memory and the limits a container sets.

What cannot be found out is None. psutil reports the host even inside a container, so the limits come from
`host/container.py`.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cuadrilla.host.container import Cgroups, read_cpu, read_memory, read_text
from cuadrilla.host.programs import run
from cuadrilla.version import __version__

PSUTIL_ERRORS = (psutil.Error, OSError, RuntimeError, ValueError, KeyError, AttributeError, NotImplementedError)
"""What psutil raises where a system gives no answer, or /proc is not mounted."""
SYSCTL_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One machine. None means "unknown"; in `wsl` and `container` it means "not in one"."""

    system: str  # Linux, Darwin, Windows
    system_version: str | None  # "Ubuntu 24.04.1 LTS", "15.1", "10.0.26100"
    kernel: str | None
    machine: str | None  # x86_64, arm64, ...
    wsl: int | None  # 1 or 2
    container: str | None  # docker, podman, lxc, kubernetes, ...
    processor: str | None  # name of the processor
    cores: float  # cores that this process may run on, or a container's quota, such as 1.5
    memory_bytes: int  # memory of the machine, or the container's limit if that is lower
    available_bytes: int


def parse_wsl(kernel: str) -> int | None:
    """1 or 2 from a kernel release: `5.15.153.1-microsoft-standard-WSL2`, `4.4.0-19041-Microsoft`."""
    if re.match(r"4\.4\..*Microsoft", kernel):
        return 1
    return 2 if "microsoft" in kernel.lower() or "wsl" in kernel.lower() else None


def parse_cpuinfo(text: str) -> tuple[str | None, frozenset[str]]:
    """Name and flags (`avx512_bf16`, `amx_bf16`, ...) of the processor, from /proc/cpuinfo of an x86 or ARM Linux."""
    rows = [
        (key.strip().lower(), value.strip()) for key, _, value in (line.partition(":") for line in text.splitlines())
    ]
    names = (value for key, value in rows if key in ("model name", "hardware", "model") and not value.isdigit())
    flags = (value for key, value in rows if key in ("flags", "features"))
    return next(names, None), frozenset(next(flags, "").lower().split())


def cpu_flags() -> frozenset[str]:
    """Flags of this machine's processor; empty on any system but Linux."""
    return parse_cpuinfo(read_text(Path("/proc/cpuinfo")))[1]


def find_container(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """The kind of container that this process runs in, from the marks that runtimes leave; None outside of one."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "docker" if (root / ".dockerenv").exists() else environ.get("container") or None


def _processor(system: str) -> str | None:
    found = ""
    if system == "Linux":
        found = parse_cpuinfo(read_text(Path("/proc/cpuinfo")))[0] or ""
    elif system == "Darwin":
        said = run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], seconds=SYSCTL_SECONDS)
        found = said.text if said.ok else ""
    return found or platform.processor() or platform.machine() or None


def _cores() -> float:
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limited = read_cpu(Cgroups())
    return min(allowed, limited[1]) if limited else allowed


def _system_version(system: str) -> str | None:
    if system == "Linux":
        with suppress(OSError):
            return platform.freedesktop_os_release()["PRETTY_NAME"]
        return None
    return (platform.mac_ver()[0] if system == "Darwin" else platform.version()) or None


def read_facts() -> Facts:
    """This machine, now."""
    system, kernel = platform.system(), platform.release() or None
    used, memory = read_memory(Cgroups())
    return Facts(
        system=system,
        system_version=_system_version(system),
        kernel=kernel,
        machine=platform.machine() or None,
        wsl=parse_wsl(kernel or "") if system == "Linux" else None,
        container=find_container(os.environ) if system == "Linux" else None,
        processor=_processor(system),
        cores=_cores(),
        memory_bytes=memory,
        available_bytes=memory - used,
    )


def read_environment() -> dict[str, Any]:
    """What a run was made with, stored as `env.json`: Python, system, processor and the version of every package."""
    facts = read_facts()
    heads = [found.metadata for found in importlib.metadata.distributions()]  # each access to `metadata` reads it anew
    packages = {head["Name"]: head["Version"] for head in heads if head["Name"] and head["Name"] != "cuadrilla"}
    return {
        "cuadrilla": __version__,
        "python": platform.python_version(),
        "system": facts.system_version,
        "machine": facts.machine,
        "cpu": facts.processor,
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
