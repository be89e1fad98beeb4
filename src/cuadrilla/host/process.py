"""System settings of this process: freed memory is kept, waiting threads sleep early, many files may be open."""

import ctypes
import os
import sys
from collections.abc import MutableMapping

if sys.platform != "win32":
    import resource

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BLOCK_BYTES = 2**30
SPINS = "4000"
"""Spins of a waiting thread: 0.1 ms, the time from one product of torch to the next. Libgomp's default is 300,000."""


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks for the next pass instead of giving them back to the kernel.

    Each pass allocates and frees the same hundreds of megabytes. If they were mapped anew, their page faults would cost
    a part of each step. Every command calls this first; `crew/equipment.py` calls it for users' own programs. Without
    glibc (macOS, Windows, musl) nothing changes.
    """
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def sleep_early(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads sleep soon when they wait for the others. Call it before torch is loaded.

    A spinning thread keeps a core that the others need. Libgomp spins for milliseconds: beside another program that
    computes, each product then waits for the end of a time slice. Small steps took up to fifty times as long there,
    and three times as long with `SPINS` (docs/experiments.md). A value set by the user stays.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def allow_descriptors(count: int) -> None:
    """Raise the limit of open files and connections to `count`, as far as the system allows. It is never lowered.

    Windows has no such limit for sockets.
    """
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < allowed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
