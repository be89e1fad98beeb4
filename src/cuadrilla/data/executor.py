"""The processes that do the jobs of a preparation: those of this machine, or the workers of a Dask cluster (`dask.py`).

A job is a function over a `concurrent.futures.Executor`. Results come in the order of the jobs, so the outcome does not
depend on the number of processes; few jobs are begun ahead, so memory is bounded.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from cuadrilla.errors import ResourceError

P = ParamSpec("P")
T = TypeVar("T")

AHEAD = 2
"""Jobs begun ahead for each process: enough that none is idle, few enough to bound memory."""

Call = tuple[Callable[..., bytes], tuple[Any, ...]]
"""A job: a function and its arguments."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who does jobs."""

    submit: Callable[..., Future[bytes]]
    """That of an executor."""
    count: Callable[[], int]
    """How many jobs run at the same time now."""
    share: Callable[[Path], Any] = lambda path: path
    """How a file is given to jobs: its path here, its content to workers that do not have this machine's disk."""

    def run(self, calls: Iterable[Call | None]) -> Iterator[bytes | None]:
        """The result of each call, in order; None for None. Raises what a job raised, ResourceError if a process was
        killed."""
        waiting: deque[Future[bytes] | None] = deque()
        try:
            for call in calls:
                waiting.append(self.submit(call[0], *call[1]) if call else None)
                while len(waiting) > AHEAD * self.count():
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        except BrokenExecutor as error:
            raise ResourceError(
                "a process of the preparation was killed; it may have run out of memory",
                hint="run the same command again, with fewer --processes; finished work is kept",
            ) from error


def _result(future: Future[bytes] | None) -> bytes | None:
    return future.result() if future else None


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def processes(count: int) -> Iterator[Workers]:
    """So many processes of this machine; one is this very process. They end with the block, at once if it failed."""
    if count == 1:
        yield Workers(submit=_here, count=lambda: 0)
        return
    pool = _Pool(count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        yield Workers(submit=pool.submit, count=lambda: count)
    except BaseException:
        for process in list((pool._processes or {}).values()):  # from Python 3.14 on: `kill_workers`
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _here(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(function(*args, **kwargs))
    return future


class _Pool(ProcessPoolExecutor):
    """Begins its processes when there are jobs for them, so small texts start few."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with _unattended_start():
            return super().submit(function, *args, **kwargs)


@contextmanager
def _unattended_start() -> Iterator[None]:
    """A process that starts meanwhile does not run the caller's script again, so that needs no main guard; and Ctrl-C
    is held back in it until it says that it ignores it."""
    main, can_block = sys.modules["__main__"], hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if can_block else set()
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if can_block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """The first thing that a process does: who started it decides when it ends, and if that one is killed, so is it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
