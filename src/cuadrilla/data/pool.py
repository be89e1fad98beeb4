"""Who does the jobs of a preparation: the processes of this machine, and their end if anything goes wrong.

Others may be handed in (`Pool`), such as the workers of a Dask cluster. Each process here is `python -m
cuadrilla.data.work`, fed through a pipe: nothing of the caller's program is imported again (so it works from a script,
a notebook, on macOS and Windows), nothing is pickled, and a process whose owner was killed sees the end of its input
and leaves. Results come in the order of the jobs, so the outcome does not depend on the number of processes.
"""

import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from cuadrilla import errors
from cuadrilla.data.frames import receive, send
from cuadrilla.data.work import Job, LoadJob, request, run_job
from cuadrilla.errors import ConfigError, CuadrillaError, ResourceError

MAX_PROCESSES = 256
AHEAD = 2
"""Jobs that wait for each process: enough that none is idle, few enough to bound memory."""
_ONE_THREAD = ("TOKENIZERS_PARALLELISM", "false"), ("RAYON_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1")


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_processes(count: int | None) -> int:
    """The number of processes to use. Raises ConfigError."""
    if count is not None and not 1 <= count <= MAX_PROCESSES:
        raise ConfigError(
            "--processes {count} is out of range", count=count, hint="from 1 to {most}", most=MAX_PROCESSES
        )
    return count or min(available_cores(), MAX_PROCESSES)


Jobs = Iterable[tuple[Job, bytes] | None]
"""Each with its payload; None: done already."""


class Pool(Protocol):
    """Whoever does jobs."""

    def run(self, jobs: Jobs) -> Iterator[None]:
        """Yields once for each job, in order, when its file is there.

        Raises what the job raised, ResourceError if a process was killed.
        """

    def warm(self, job: LoadJob) -> None:
        """Have those who wait do `job` while the caller goes on, or nothing; if it fails, so will the job it is for."""


class Processes:
    """Runs jobs on `processes` processes; on one, in this very process. A context manager; leaving it ends them."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._children: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            for child in self._children:
                child.kill()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):  # what was not sent yet has no reader
                    if pipe:
                        pipe.close()
            child.wait()

    def run(self, jobs: Jobs) -> Iterator[None]:
        if self._count == 1:
            for job in jobs:
                if job:
                    run_job(*job)
                yield
            return
        yield from in_order(jobs, submit=self._submit, ahead=lambda: AHEAD * self._count)

    def warm(self, job: LoadJob) -> None:
        if self._threads:
            for _ in self._children:
                self._threads.submit(self._run_one, job, b"")

    def _submit(self, job: Job, payload: bytes) -> Callable[[], None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="prepare")
        if len(self._children) < self._count:  # one more for each of the first jobs: small texts start few
            child = _start()
            self._children.append(child)
            self._idle.put(child)
        return self._threads.submit(self._run_one, job, payload).result

    def _run_one(self, job: Job, payload: bytes) -> None:
        child = self._idle.get()
        assert child.stdin
        assert child.stdout
        try:
            send(child.stdin, request(job), payload)
            answer = receive(child.stdout)
        except OSError:
            answer = None
        self._idle.put(child)
        if answer is None:
            raise ResourceError(
                "a process of the preparation ended with {code}; it may have run out of memory",
                code=child.wait(),
                hint="run the same command again, with fewer --processes; finished work is kept",
            )
        if "error" in answer[0]:
            raise error_of(answer[0])


def in_order(
    jobs: Jobs, *, submit: Callable[[Job, bytes], Callable[[], None]], ahead: Callable[[], int]
) -> Iterator[None]:
    """Yields once for each job, in order. `submit` begins one and returns what waits for its end; `ahead` are begun
    before the first of them is waited for."""
    waiting: deque[Callable[[], None] | None] = deque()
    for job in jobs:
        waiting.append(submit(*job) if job else None)
        while len(waiting) > ahead():
            _finish(waiting.popleft())
            yield
    while waiting:
        _finish(waiting.popleft())
        yield


def _finish(wait: Callable[[], None] | None) -> None:
    if wait:
        wait()


def error_of(answer: dict[str, Any]) -> CuadrillaError:
    """What a job raised in another process."""
    kind = getattr(errors, answer["error"])
    assert issubclass(kind, CuadrillaError)
    error = kind(answer["message"], hint=answer["hint"])
    assert isinstance(error, CuadrillaError)
    return error


def _start() -> subprocess.Popen[bytes]:
    """A process of its own group: Ctrl-C is for us alone, we end the others."""
    own_group: dict[str, Any] = (
        {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
        if os.name == "nt"
        else {"start_new_session": True}
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cuadrilla.data.work"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **dict(_ONE_THREAD)},
        **own_group,
    )
