"""Memory of this machine: what the C library does with freed memory, whom the kernel has killed for want of it."""

import ctypes
import re
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BLOCK_BYTES = 2**30
COUNTERS = Path("/proc/vmstat")


def keep_freed_memory() -> bool:
    """Let glibc keep large freed blocks for the next pass instead of giving them back to the kernel.

    A pass allocates and frees the same hundreds of megabytes each time; mapped anew, their page faults cost a part
    of a step. Every command begins with it; `crew/local.py` and `crew/worker.py` call it as well, for programs of
    one's own and for Ray's actors. Returns False where there is no glibc (macOS, Windows, musl): there nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    return bool(kept and library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def num_killed_for_memory() -> int:
    """How many processes the kernel has killed since it started because memory, or that of a control group, ran out.

    0 where it does not say (anything but Linux).
    """
    return parse_oom_kills(COUNTERS.read_text()) if COUNTERS.exists() else 0


def parse_oom_kills(vmstat: str) -> int:
    found = re.search(r"^oom_kill (\d+)$", vmstat, re.MULTILINE)
    return int(found[1]) if found else 0
