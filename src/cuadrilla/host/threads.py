"""Work whose threads must not outlive it.

Each thread that computes in parallel has helpers of its own (OpenMP), which stay as long as it does. GNU's OpenMP spins
between two products only while a process has no more of all these threads than cores; with more of them, idle or not,
each product ends with a sleep, and the next one with waking up: 16 rows of a 124M model took 61 instead of 49 ms.
"""

from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import TypeVar

Result = TypeVar("Result")


def in_passing_thread(call: Callable[[], Result]) -> Result:
    """What `call` returns or raises, from a thread that ends with it, and its helpers too.

    Ctrl-C does not wait for it: the thread is a daemon.
    """
    pool = ThreadPool(1)
    try:
        result = pool.apply(call)
    finally:
        pool.close()
    pool.join()
    return result
