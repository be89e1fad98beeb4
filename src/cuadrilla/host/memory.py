"""How the C library handles freed memory while a model trains on the CPU."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BLOCK_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Let glibc keep large freed blocks for the next pass instead of giving them back to the kernel.

    A pass allocates and frees the same hundreds of megabytes each time; mapped anew, their page faults cost a part
    of a step. Returns False where there is no glibc (macOS, Windows, musl): nothing is changed there.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    return bool(kept and library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
