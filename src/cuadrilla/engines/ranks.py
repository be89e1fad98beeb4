"""Processes that end together: started, watched, shown line by line, and stopped as one process group.

Invariants
* The first one that fails ends the others: SIGTERM to the group, and SIGKILL when the grace is over.
* A first SIGINT is handed on once, a second signal kills. The signals' handlers act themselves: who waits for a
  terminal that takes no more output is still heard.
* What ends the ranks of one machine of several, but for their own end, ends those of the others (`host/lines.py`).
* Nothing that the ranks have started stays, also if this process is killed (`keeper.py`), unless it has left the group.
* What a rank writes is shown unchanged, in whole lines. A carriage return ends a line, too: bars of progress are made
  of them.
"""

import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from cuadrilla.engines import keeper
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, EnvironmentProblem
from cuadrilla.host.lines import DONE, FAILED, INTERRUPTED, Lines, Word
from cuadrilla.host.memory import num_killed_for_memory
from cuadrilla.messages import Message
from cuadrilla.rundir import storage_errors

LOOK_SECONDS = 0.5
DRAIN_SECONDS = 1.0
KILLED_SECONDS = 5.0
"""A process that is stuck inside a driver may outlive SIGKILL; it is not waited for any longer."""
READ_BYTES = 2**16
LONGEST_LINE_BYTES = 2**26
"""What has no end by then is shown in parts."""

Show = Callable[[int, bool, Sequence[bytes]], None]
"""Lines of a rank with their ends; `True`: of its standard error."""


@dataclass(frozen=True, kw_only=True)
class EndedRank:
    """`code`: as `subprocess` has it, minus the signal; None: it could not be killed."""

    rank: int
    pid: int
    code: int | None
    seconds: float

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        code = -signal.SIGKILL if self.code is None else self.code
        return 128 - code if code < 0 else code


@dataclass(frozen=True, kw_only=True)
class RanksOutcome:
    """`failed`: the rank that was the first to, unless somebody had asked for the end before. `elsewhere`: what had
    happened before on another machine."""

    ranks: tuple[EndedRank, ...]
    failed: EndedRank | None
    elsewhere: Word | None
    interrupted: bool
    memory_ran_out: bool


@dataclass(frozen=True, kw_only=True)
class Orders:
    """`environments`: all variables of each rank. `logs`: a folder for a file of each, which is added to.

    `lines`: to the launchers of other machines.
    """

    command: Sequence[str]
    environments: Mapping[int, Mapping[str, str]]
    grace_seconds: float
    logs: Path | None = None
    lines: Lines = field(default_factory=lambda: Lines({}, number=0))


def run_ranks(orders: Orders, *, show: Show, tell: Callable[[str], None]) -> RanksOutcome:
    """Start all ranks and wait for their end. In the main thread only.

    Raises ConfigError if the program cannot be started, ResourceError if a log cannot be written, EnvironmentProblem
    if the keeper dies.
    """
    with ExitStack() as stack:
        group = stack.enter_context(_Group.open(orders, show=show, tell=tell))
        stack.enter_context(_heard(group))
        group.start(stack)
        return group.finish()


@dataclass
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    began: float
    log: IO[bytes] | None
    ended: EndedRank | None = None


@dataclass
class _Stream:
    """What has come of the line that is not complete yet: parts, so that a long one is not copied again and again."""

    rank: _Rank
    is_error: bool
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, data: bytes) -> list[bytes]:
        """The lines that are complete now."""
        if self.parts and self.parts[-1].endswith(b"\r"):
            data, self.parts, self.num_bytes = b"".join([*self.parts, data]), [], 0
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # a last \r may be half of a \r\n
        if not cut:
            self.parts.append(data)
            self.num_bytes += len(data)
            return self.rest() if self.num_bytes > LONGEST_LINE_BYTES else []
        lines = b"".join([*self.parts, data[:cut]])
        self.parts, self.num_bytes = [data[cut:]], len(data) - cut
        return _lines(lines)

    def rest(self) -> list[bytes]:
        left, self.parts, self.num_bytes = b"".join(self.parts), [], 0
        return _lines(left)


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


class _Group:
    def __init__(
        self, orders: Orders, leader: "subprocess.Popen[bytes]", *, show: Show, tell: Callable[[str], None]
    ) -> None:
        self._orders, self._leader, self._show, self._tell = orders, leader, show, tell
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._failed: EndedRank | None = None
        self._elsewhere: Word | None = None
        self._signals: list[int] = []
        self._to_send: deque[signal.Signals] = deque()
        self._due = float("inf")
        self._stopping = self._killed = self._keeper_died = False
        self._killed_for_memory = num_killed_for_memory()

    @classmethod
    @contextmanager
    def open(cls, orders: Orders, *, show: Show, tell: Callable[[str], None]) -> Iterator["_Group"]:
        command = [sys.executable, "-I", "-S", keeper.__file__, str(orders.grace_seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as leader:
            group = cls(orders, leader, show=show, tell=tell)
            try:
                assert leader.stdout is not None
                if not leader.stdout.read(1):
                    raise EnvironmentProblem("a helper process cannot be started", hint="is there enough memory?")
                with closing(group._selector):
                    group._selector.register(leader.stdout, selectors.EVENT_READ)
                    for connection in orders.lines.connections:
                        group._selector.register(connection, selectors.EVENT_READ, connection)
                    yield group
            except BaseException:  # nobody reads their output any more, a log's disk is full, ...
                group._end(signal.SIGTERM, seconds=orders.grace_seconds)
                raise
            finally:
                group._end(signal.SIGKILL, seconds=KILLED_SECONDS)

    # -- start ---------------------------------------------------------------------------------------------------------

    def start(self, stack: ExitStack) -> None:
        for number, environ in self._orders.environments.items():
            if self._stopping:
                return
            log = None
            if self._orders.logs is not None:
                path = self._orders.logs / f"{number}.log"
                with storage_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    log = stack.enter_context(path.open("ab", buffering=0))
            self._start(number, environ, log, stack)

    def _start(self, number: int, environ: Mapping[str, str], log: IO[bytes] | None, stack: ExitStack) -> None:
        command = self._orders.command
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=self._leader.pid,
                bufsize=0,
            )
        except OSError as error:
            raise _not_started(command[0], error) from None
        rank = _Rank(number, process, time.monotonic(), log)
        self._ranks.append(rank)
        for pipe, is_error in ((process.stdout, False), (process.stderr, True)):
            assert pipe is not None
            stack.enter_context(pipe)
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(rank, is_error))

    # -- watch ---------------------------------------------------------------------------------------------------------

    def finish(self) -> RanksOutcome:
        told = said = False
        while True:
            self._read(LOOK_SECONDS)
            if self._signals and not said:
                said = True
                self._orders.lines.announce(INTERRUPTED)
            self._notice_ends()
            if time.monotonic() >= self._due and not self._next_signal():
                break
            if all(rank.ended for rank in self._ranks):
                left = self._left_over()
                if not left:
                    break
                if not self._stopping and not told:
                    told = True
                    told_text = "the ranks have left {number} processes: they have {seconds:g} s to end"
                    self._tell(Message(told_text, number=left, seconds=self._orders.grace_seconds))
                    self._begin(signal.SIGTERM, after=self._orders.grace_seconds)
        deadline = time.monotonic() + DRAIN_SECONDS  # a process that has left the group may hold a pipe open
        while self._read(0) and time.monotonic() < deadline:
            pass
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Stream):
                self._pass_on(key.data, key.data.rest())
        return self._outcome()

    def _outcome(self) -> RanksOutcome:
        if self._keeper_died and not self._signals:
            raise EnvironmentProblem(
                "the process that keeps the ranks together was killed", hint="type the same command again"
            )
        now = time.monotonic()
        stuck = "rank {rank} (process {pid}) does not end, though it was killed"
        for rank in self._ranks:
            if rank.ended is None:
                self._tell(Message(stuck, rank=rank.number, pid=rank.process.pid))
                rank.ended = EndedRank(rank=rank.number, pid=rank.process.pid, code=None, seconds=now - rank.began)
        if not (self._failed or self._elsewhere or self._signals):
            self._orders.lines.announce(DONE)
        return RanksOutcome(
            ranks=tuple(rank.ended for rank in self._ranks if rank.ended),
            failed=self._failed,
            elsewhere=self._elsewhere,
            interrupted=bool(self._signals),
            memory_ran_out=num_killed_for_memory() != self._killed_for_memory,
        )

    def _read(self, seconds: float) -> bool:
        """Show what has come; whether anything has."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if isinstance(key.data, socket.socket):
                self._listen(key.data)
                continue
            data = os.read(key.fd, READ_BYTES)
            stream = key.data
            if isinstance(stream, _Stream):
                if data and stream.rank.log is not None:
                    with storage_errors(Path(stream.rank.log.name)):
                        _write_all(stream.rank.log, data)
                self._pass_on(stream, stream.add(data) if data else stream.rest())
            elif stream is None and not data:
                self._keeper_died = not self._killed
                self._begin(signal.SIGTERM)
            if not data:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _listen(self, connection: socket.socket) -> None:
        for word in self._orders.lines.hear(connection):
            if word.how != DONE and not self._stopping:
                self._elsewhere = word
                self._begin(*((signal.SIGINT,) if word.how == INTERRUPTED else ()), signal.SIGTERM)
        if connection not in self._orders.lines.connections:
            self._selector.unregister(connection)

    def wake_on(self, descriptor: int) -> None:
        """A pipe that says that a signal has come: a child's end is noticed at once."""
        self._selector.register(descriptor, selectors.EVENT_READ, "woken")

    def _pass_on(self, stream: _Stream, lines: list[bytes]) -> None:
        if lines:
            self._show(stream.rank.number, stream.is_error, lines)

    def _notice_ends(self) -> None:
        for rank in self._ranks:
            if rank.ended is None and rank.process.poll() is not None:
                code, seconds = rank.process.returncode, time.monotonic() - rank.began
                rank.ended = EndedRank(rank=rank.number, pid=rank.process.pid, code=code, seconds=seconds)
                if code and not self._stopping:
                    self._failed = rank.ended
                    self._orders.lines.announce(FAILED, rank=rank.number, exit_code=rank.ended.exit_code)
                    self._begin(signal.SIGTERM)

    def _left_over(self) -> int:
        """How many live processes are in the group beside the keeper."""
        found = 0
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                in_group = pid != self._leader.pid and os.getpgid(pid) == self._leader.pid
                found += in_group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return found

    # -- stop ----------------------------------------------------------------------------------------------------------

    def heard(self, number: int, _frame: FrameType | None) -> None:
        """The handler of signals."""
        if number == signal.SIGHUP and self._stopping:
            return  # kernel and shell both say so: twice is no haste
        self._signals.append(number)
        if len(self._signals) > 2:
            self._send(signal.SIGKILL)
            os._exit(INTERRUPTED_EXIT_CODE)
        if self._stopping:
            self._to_send = deque([signal.SIGKILL])
            self._next_signal()
        elif number == signal.SIGINT:
            self._begin(signal.SIGINT, signal.SIGTERM)
        else:
            self._begin(signal.SIGTERM)

    def _begin(self, *first: signal.Signals, after: float = 0.0) -> None:
        """Each of them, then SIGKILL, with the grace between."""
        if self._stopping:
            return
        self._stopping = True
        self._to_send = deque([*first, signal.SIGKILL])
        self._due = time.monotonic() + after
        if not after:
            self._next_signal()

    def _end(self, number: signal.Signals, *, seconds: float) -> None:
        """Where nothing is shown any more."""
        self._send(number)
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))

    def _next_signal(self) -> bool:
        """Whether there was one left."""
        if not self._to_send:
            return False
        number = self._to_send.popleft()
        self._due = time.monotonic() + (self._orders.grace_seconds if self._to_send else KILLED_SECONDS)
        self._send(number)
        return True

    def _send(self, number: signal.Signals) -> None:
        """To the whole group. Its leader is not waited for before the end, so that its number is no other's."""
        self._killed = self._killed or number == signal.SIGKILL
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of dead processes only
            os.killpg(self._leader.pid, number)


@contextmanager
def _heard(group: _Group) -> Iterator[None]:
    """Signals reach the group, and wake who waits for output."""
    receive, send = os.pipe()
    for descriptor in (receive, send):
        os.set_blocking(descriptor, False)
    wanted: dict[int, Callable[[int, FrameType | None], object]] = {
        signal.SIGINT: group.heard,
        signal.SIGTERM: group.heard,
        signal.SIGCHLD: lambda *_: None,
    }
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        wanted[signal.SIGHUP] = group.heard
    before = {number: signal.signal(number, action) for number, action in wanted.items()}
    wakes = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    group.wake_on(receive)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakes)
        for number, action in before.items():
            signal.signal(number, action)
        os.close(receive)
        os.close(send)


def _not_started(program: str, error: OSError) -> ConfigError:
    hint = "name a program, such as: cuadrilla launch -- python {name}"
    if error.errno in (errno.EMFILE, errno.EAGAIN, errno.ENOMEM):
        hint = "fewer --processes, or higher limits (ulimit -n, ulimit -u)"
    name = program if program.endswith(".py") else "train.py"
    reason = error.strerror or error
    return ConfigError("cannot start {program}: {reason}", program=program, reason=reason, hint=hint, name=name)


def _write_all(file: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
