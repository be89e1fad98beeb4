"""What the C library does with freed memory."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BLOCK_BYTES = 2**30


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
