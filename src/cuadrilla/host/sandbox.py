"""A child process for something that there is no reason to trust, and what it gives up for good before it opens that.

`run_in_sandbox` starts a module of ours with next to no environment and waits for it, `reading_from` takes what it
writes meanwhile; the module calls `enter_sandbox` first.
Linux lets any process refuse itself system calls (seccomp):
https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
Where something cannot be given up, that is returned as a sentence for the user, "" otherwise.
"""

import ctypes
import errno
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cuadrilla.messages import Message

INHERITED = ("PATH", "PYTHONPATH", "SYSTEMROOT", "TMPDIR", "TEMP", "VIRTUAL_ENV")
MAX_SAID_BYTES = 10**6
MAX_REASON = 300
_END_SECONDS = 10.0  # a child whose output has ended is on its way

# Numbers from the kernel's tables of system calls.
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SECCOMP = {"x86_64": 317, "aarch64": 277}
REFUSED = {  # socket, connect, bind, execve, execveat, ptrace, kill, io_uring_setup
    "x86_64": (41, 42, 49, 59, 322, 101, 62, 425),
    "aarch64": (198, 203, 200, 221, 281, 117, 129, 425),
}
_FIRST_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000 | errno.EPERM
_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _ALL_THREADS = 38, 1, 1


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended; `code` is None if it did not in time."""

    code: int | None
    said: str
    complaint: str

    @property
    def reason(self) -> str:
        """Why it failed, in a line."""
        if self.code is None:
            return Message("it took too long")
        if self.code < 0:
            return Message("signal {signal} ended the process that read it", signal=-self.code)
        lines = [line.strip() for line in self.complaint.splitlines() if line.strip()]
        return lines[-1][:MAX_REASON] if lines else Message("exit code {code}", code=self.code)


def run_in_sandbox(module: str, *arguments: str, folder: Path, timeout_seconds: float) -> Ended:
    """Run a module of ours in `folder` as a child that may fail in any way."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        with _start(module, arguments, folder=folder, stdout=said, stderr=complained) as child:
            code = _wait(child, timeout_seconds)
        return Ended(code=code, said=_read(said), complaint=_read(complained))


class Sandboxed:
    """Such a child, from `reading_from`, while what it writes is read from `output`."""

    def __init__(self, child: subprocess.Popen[bytes], complained: IO[bytes]) -> None:
        assert child.stdout
        self._child = child
        self._complained = complained
        self.output = child.stdout

    def ended(self) -> Ended:
        """How the child ended, once its output has."""
        return Ended(code=_wait(self._child, _END_SECONDS), said="", complaint=_read(self._complained))


@contextmanager
def reading_from(module: str, *arguments: str, folder: Path) -> Iterator[Sandboxed]:
    """Run a module of ours in `folder` as a child that may fail in any way, and is over at the end of the block."""
    with (
        tempfile.TemporaryFile() as complained,
        _start(module, arguments, folder=folder, stdout=subprocess.PIPE, stderr=complained) as child,
    ):
        yield Sandboxed(child, complained)


@contextmanager
def _start(
    module: str, arguments: Sequence[str], *, folder: Path, stdout: IO[bytes] | int, stderr: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    if "PYTHONPATH" in environment:  # the child begins in another folder
        places = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places))
    environment["TOKENIZERS_PARALLELISM"] = "false"  # each thread of that library would reserve memory for itself
    command = [sys.executable, "-P", "-m", module, *arguments]  # -P: no module is taken from the folder
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, cwd=folder
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _wait(child: subprocess.Popen[bytes], timeout_seconds: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return child.wait(timeout=timeout_seconds)
    return None


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_SAID_BYTES).decode(errors="replace")


def enter_sandbox(num_bytes: int, *, cpu_seconds: int) -> str:
    """Give up the network, new programs, more memory and larger files than `num_bytes`, and time; what could not be."""
    return "; ".join(filter(None, (limit_resources(num_bytes, cpu_seconds=cpu_seconds), cut_off())))


def cut_off() -> str:
    """No sockets and no new programs in this process from now on; the reason if the system does not allow it."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in SECCOMP:
        return f"on {platform.system()} {machine} this process is not cut off from the network"
    refused = REFUSED[machine]
    last = len(refused) + 5  # where all refusals jump to; a jump counts the instructions between
    steps = [
        (_LOAD, 0, 0, 4),  # the architecture of the call
        (_EQUAL, 0, last - 2, AUDIT_ARCH[machine]),
        (_LOAD, 0, 0, 0),  # its number
        (_AT_LEAST, last - 4, 0, _FIRST_X32),
        *((_EQUAL, last - 5 - place, 0, number) for place, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO),
    ]
    program = _Program(len(steps), (_Instruction * len(steps))(*(_Instruction(*step) for step in steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        SECCOMP[machine], _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)
    ):
        return f"this process is not cut off from the network: {os.strerror(ctypes.get_errno())}"
    return ""


def limit_resources(num_bytes: int, *, cpu_seconds: int) -> str:
    """From now on at most so much more memory, files of at most that size, so much processor time, no core dump.

    Returns the reason where memory cannot be limited.
    """
    if sys.platform == "win32":
        return "on Windows the memory of this process is not limited"
    import resource

    pages = Path("/proc/self/statm")
    used = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    wanted = {
        resource.RLIMIT_AS: used + num_bytes,
        resource.RLIMIT_FSIZE: num_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        if kind != resource.RLIMIT_AS or used:
            _, allowed = resource.getrlimit(kind)
            value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
            resource.setrlimit(kind, (value, value))
    return "" if used else f"on {platform.system()} the memory of this process is not limited"
