"""Run the jobs of a preparation in processes of this machine, or wherever the caller's executor runs them.

A `concurrent.futures.Executor` runs the jobs. Results come in the order of the jobs, so the outcome does not depend on
the number of processes. Only a few jobs are started ahead, so memory is bounded.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from cuadrilla.errors import ResourceError

T = TypeVar("T")


def in_order(executor: Executor, calls: Iterable[Callable[[], T]], *, ahead: int) -> Iterator[T]:
    """The result of each call, in order; `ahead` calls are started before the first result is taken. Raises what a
    call raised, ResourceError if a process was killed."""
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(executor.submit(call))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenExecutor as error:
        raise ResourceError(
            "a process of the preparation was killed; it may have run out of memory",
            hint="run the same command again, with fewer --processes",
        ) from error


@contextmanager
def processes(count: int) -> Iterator[Executor]:
    """`count` processes of this machine, which end with the block. A single one is a thread of this process."""
    spawn = multiprocessing.get_context("spawn")
    pool = ThreadPoolExecutor(1) if count == 1 else _Pool(count, mp_context=spawn, initializer=_begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Pool(ProcessPoolExecutor):
    """New processes do not import the caller's script again, so the script needs no main guard."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return super().submit(function, *args, **kwargs)
        finally:
            sys.modules["__main__"] = main


def _begin() -> None:
    """Set up a process: Ctrl-C does not end it, its parent does. If the parent is killed, the process ends, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
