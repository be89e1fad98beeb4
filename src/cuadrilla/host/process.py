"""What this process asks of its system: freed memory to be kept, threads that sleep early, many open files."""

import ctypes
import os
import sys
from collections.abc import MutableMapping

if sys.platform != "win32":
    import resource

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BLOCK_BYTES = 2**30
SPINS = "4000"
"""A tenth of a millisecond, as long as torch needs from one product to the next; libgomp's own choice is 300,000."""


def keep_freed_memory() -> bool:
    """Let glibc keep large freed blocks for the next pass instead of giving them back to the kernel.

    A pass allocates and frees the same hundreds of megabytes each time; mapped anew, their page faults cost a part
    of a step. Every command begins with it; `crew/equipment.py` calls it as well, for programs of one's own and for
    Ray's actors. Returns False where there is no glibc (macOS, Windows, musl): there nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    return bool(kept and library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def sleep_early(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let a thread of OpenMP that waits for the others of its pass sleep soon. To be called before torch is loaded.

    A thread that spins keeps the core which the others need. With libgomp's usual milliseconds each product, beside
    another program that computes, waits for the end of a time slice: small steps took up to fifty times as long there,
    with these three times (docs/experiments.md). What the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def allow_descriptors(count: int) -> None:
    """Raise the limit of open files and connections to so many, as far as the system lets; it is never lowered.

    Windows knows no such limit for sockets.
    """
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < allowed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
