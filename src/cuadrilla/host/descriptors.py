"""How many files and connections this process may have open: systems begin with few, and allow more when asked."""

import sys

if sys.platform != "win32":
    import resource


def allow_descriptors(count: int) -> int:
    """Raise this process's limit to so many, as far as the system lets; how many it may have open now.

    Windows knows no such limit for sockets.
    """
    if sys.platform == "win32":
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return max(soft, count) if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
