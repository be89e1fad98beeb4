"""Tells a person what happens to a run: starts a program of theirs, or sends a message to an address (`[alarm]`).

    with Alarms(config.alarm, run=run) as alarms:
        ...  # alarms.hear(kind, fields) for each event

Invariants
* A run is never held up and never fails by this. `hear` only leaves word, `MOST_WAITING` at most; a thread starts a
  process for each message and kills it after `LIMIT_SECONDS`. What goes wrong is a warning in the log, the same thing
  again a line of the log's file only.
* At the end only the last word (finished, stopped, failed) is waited for, `LIMIT_SECONDS` and a moment at most.
* No shell. Fields are filled into arguments, never into the program's name, and make no argument an option.
* The address is read from its file for each message, and is in no argument, variable, log or run file.
* Words of other machines (names, reasons) are one line of bounded length; in a message they neither make a link nor
  call anybody.
"""

import contextlib
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from cuadrilla.config import AlarmSection
from cuadrilla.errors import ConfigError, CuadrillaError
from cuadrilla.host.probe import kill
from cuadrilla.messages import Message, language
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, read_regular, typed
from cuadrilla.runfile import has_begun
from cuadrilla.train.webhook import is_loopback

LIMIT_SECONDS = 10.0
"""For one message, its program and its address together."""
MOMENT_SECONDS = 2.0
POLL_SECONDS = 0.05
MOST_WAITING = 8
MOST_TEXT, MOST_NAME = 500, 100
MOST_ADDRESS_BYTES = 4096
FINAL = ("finished", "stopped", "failed")
FIELD = re.compile(r"\{(title|text|run|event|time)\}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One message. `more`: others that were not sent since the last one."""

    event: str
    run: str
    title: Message
    text: Message
    time: float
    more: int = 0

    def fields(self, reads: str) -> dict[str, str]:
        """As a person reads them, each one line."""
        text = self.text
        if self.more:
            text = Message("{text} ({more} more messages were left out)", text=text, more=self.more)
        return {
            "title": one_line(self.title.in_language(reads), most=MOST_TEXT),
            "text": one_line(text.in_language(reads), most=MOST_TEXT),
            "run": self.run,
            "event": self.event,
            "time": datetime.fromtimestamp(self.time, tz=UTC).isoformat(timespec="seconds"),
        }


def alarm_of(kind: str, fields: Mapping[str, Any], *, run: str, at: float) -> Alarm | None:
    """What a person is told of an event of a run; None for most."""
    worker = one_line(str(fields.get("worker", "")), most=MOST_NAME)
    reason = fields.get("reason") or ""
    match kind:
        case "finished" if fields.get("complete"):
            event, title = "finished", Message("cuadrilla: {run} has finished", run=run)
            text = Message("{run}: all {steps} steps are done", run=run, steps=fields.get("version"))
        case "finished":
            event, title = "stopped", Message("cuadrilla: {run} has stopped", run=run)
            told = "{run}: stopped at step {step}: {reason}"
            text = Message(told, run=run, step=fields.get("version"), reason=reason)
        case "failed":
            event, title = "failed", Message("cuadrilla: {run} has failed", run=run)
            text = Message("{run}: {reason}", run=run, reason=reason)
        case "left" | "evicted":
            event, title = "left", Message("cuadrilla: {run}: a worker has left", run=run)
            text = Message("{run}: {worker} has left", run=run, worker=worker)
            text = Message("{text}: {reason}", text=text, reason=reason) if reason else text
        case "late":
            event, title = "late", Message("cuadrilla: {run}: a worker is late", run=run)
            text = Message("{run}: {worker} is late; others are given its work, too", run=run, worker=worker)
        case "alarm":
            event, title = "alarm", Message("cuadrilla: {run}: a file could not be written", run=run)
            text = Message("{run}: {reason}", run=run, reason=fields.get("message") or "")
        case _:
            return None
    return Alarm(event=event, run=run, title=title, text=text, time=at)


def filled(command: Sequence[str], fields: Mapping[str, str]) -> list[str]:
    """The command's arguments with the fields in them. What is filled in is not looked at again."""
    return [command[0], *(_argument(word, fields) for word in command[1:])]


def _argument(word: str, fields: Mapping[str, str]) -> str:
    text = FIELD.sub(lambda found: fields[found[1]], word)
    return f" {text}" if text.startswith("-") and not word.startswith("-") else text


def body_of(fields: Mapping[str, str]) -> dict[str, Any]:
    """`text` is what Slack shows, `content` Discord. There `<...>` is a link or calls people, and `@` calls people."""
    plain = {name: value.translate({ord("<"): "‹", ord(">"): "›"}) for name, value in fields.items()}
    return {**plain, "content": plain["text"], "allowed_mentions": {"parse": []}}


def read_address(path: Path) -> str:
    """The address in a file. Raises ConfigError, which never says what it is."""
    try:
        status = path.stat()
        raw = read_regular(path, most_bytes=MOST_ADDRESS_BYTES)
    except OSError as error:
        hint = "write the address into that file, or leave alarm.webhook_file out"
        raise ConfigError("cannot read {path}: {reason}", path=path, reason=error.strerror, hint=hint) from error
    if os.name == "posix" and (status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077):
        told = "others may read the address in {path}"
        raise ConfigError(told, path=path, hint="chmod 600 {file}", file=typed(path))
    if problem := _wrong_with(text := raw.decode("utf-8", "replace").strip()):
        hint = "one line: https://..., or http:// for this machine itself"
        raise ConfigError("{path} holds no address: {problem}", path=path, problem=problem, hint=hint)
    return text


def _wrong_with(address: str) -> Message | None:
    if not re.fullmatch(r"[!-~]{1,2000}", address):
        return Message("it is not one line of at most 2,000 letters and signs without spaces")
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return Message("it is not written as an address")
    if not host or parts.username is not None:
        return Message("it has a user in front of the host" if host else "it has no host")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        return Message("it does not begin with https://")
    return None


class Alarms:
    """Of one run on its coordinator's machine. `hear` may be called by any thread."""

    def __init__(
        self,
        section: AlarmSection,
        *,
        run: RunDir,
        limit_seconds: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for a `webhook_file` that cannot be used by a new run; one that goes on is only warned."""
        self._section = section
        self._webhook = run.path / section.webhook_file if section.webhook_file else None
        self._run = one_line(run.path.resolve().name, most=MOST_NAME)
        self._limit_seconds, self._clock = limit_seconds, clock
        self._changed = threading.Condition()
        self._waiting: deque[Alarm] = deque()
        self._told: dict[str, float] = {}
        self._left_out = 0
        self._is_over = self._closing = False
        self._cut_at = float("inf")
        self._thread: threading.Thread | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        self._warned: set[str] = set()
        if self._webhook is not None:
            try:
                read_address(self._webhook)
            except ConfigError as error:
                if not has_begun(run):
                    raise
                self._warn(error.message)

    # -- from any thread; they wait for nothing, and raise nothing -----------------------------------------------------

    def hear(self, kind: str, fields: Mapping[str, Any]) -> None:
        """An event of the run, as it is in its events."""
        if not (self._section.command or self._webhook):
            return
        found = alarm_of(kind, fields, run=self._run, at=time.time())
        if found is None:
            return
        with self._changed:
            if self._is_over or self._closing:
                return
            self._is_over = found.event in FINAL
            if found.event in self._section.on:
                self._take(found)

    def _take(self, alarm: Alarm) -> None:
        now = self._clock()
        too_early = now - self._told.get(alarm.event, -float("inf")) < self._section.least_seconds
        if not self._is_over and (too_early or len(self._waiting) >= MOST_WAITING):
            self._left_out += 1
            return
        self._told[alarm.event] = now
        self._waiting.append(alarm)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alarms", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # -- in its thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                alarm, more = self._waiting.popleft(), self._left_out
                self._left_out = 0
            self._send(Alarm(**{**alarm.__dict__, "more": more}))

    def _send(self, alarm: Alarm) -> None:
        """Both ways at the same time, so that one that hangs does not take the other's."""
        fields, started = alarm.fields(language()), time.monotonic()
        with contextlib.ExitStack() as stack:
            program = _started(filled(self._section.command, fields)) if self._section.command else None
            if isinstance(program, subprocess.Popen):
                stack.enter_context(self._killed_after(program))
            problems = []
            if self._webhook is not None:
                problems.append(self._post(self._webhook, body_of(fields), alarm=alarm, since=started))
            if program is not None:
                problems.append(self._ended(program, alarm=alarm, since=started))
        self._judge([problem for problem in problems if problem])

    def _post(self, path: Path, body: Mapping[str, Any], *, alarm: Alarm, since: float) -> Message | None:
        """-P: a file json.py in the folder where somebody works must not stand in for the real one."""
        try:
            address = read_address(path)
        except ConfigError as error:
            return error.message
        asked = {"url": address, "body": body, "seconds": self._limit_seconds}
        child = _started([sys.executable, "-P", "-m", "cuadrilla.train.webhook"], says=json.dumps(asked).encode())
        if not isinstance(child, subprocess.Popen):
            return child
        assert child.stdout is not None
        with child.stdout:
            with self._killed_after(child):
                ended = self._in_time(child, alarm=alarm, since=since)
            told = "its address did not answer within {seconds:g} s"
            return _problem_in(child.stdout.read()) if ended else Message(told, seconds=self._limit_seconds)

    @contextlib.contextmanager
    def _killed_after(self, child: "subprocess.Popen[bytes]") -> Iterator[None]:
        self._running.append(child)
        try:
            yield
        finally:
            kill(child)
            self._running.remove(child)

    def _ended(self, program: "subprocess.Popen[bytes] | Message", *, alarm: Alarm, since: float) -> Message | None:
        if not isinstance(program, subprocess.Popen):
            return program
        name = self._section.command[0]
        if not self._in_time(program, alarm=alarm, since=since):
            return Message("{program} took more than {seconds:g} s", program=name, seconds=self._limit_seconds)
        code = program.returncode
        return Message("{program} ended with exit code {code}", program=name, code=code) if code else None

    def _in_time(self, child: "subprocess.Popen[bytes]", *, alarm: Alarm, since: float) -> bool:
        """Whether it has ended by itself. What is not the last word has little time once the run is over."""
        while child.poll() is None:
            until = since + self._limit_seconds
            if time.monotonic() >= (until if alarm.event in FINAL else min(until, self._cut_at)):
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=POLL_SECONDS)
        return True

    def _judge(self, problems: Sequence[Message]) -> None:
        for problem in problems:
            self._warn(problem)
        if not problems:
            self._warned.clear()

    def _warn(self, problem: Message) -> None:
        level = logging.INFO if problem in self._warned else logging.WARNING
        self._warned.add(problem)
        log.log(level, "a message of [alarm] was not sent: %s", problem)

    # -- from whoever trains -------------------------------------------------------------------------------------------

    def __enter__(self) -> "Alarms":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Tell of a failure, and wait for the last word. Who typed something wrong is there to read it."""
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            self.hear("failed", {"reason": reason_of(error)})
        with self._changed:
            self._closing = True
            self._cut_at = time.monotonic() + MOMENT_SECONDS
            last = [alarm for alarm in self._waiting if alarm.event in FINAL]
            self._waiting.clear()
            self._waiting.extend(last)
            self._changed.notify_all()
        if self._thread is not None:
            try:
                self._thread.join(self._limit_seconds + 2 * MOMENT_SECONDS)
            finally:  # a second Ctrl-C
                for child in list(self._running):
                    kill(child)


def reason_of(error: Exception) -> str:
    """Why a run failed: a person reads it in the alarm and in the run's events, so it has an end."""
    told = Message("{kind}: {error}", kind=type(error).__name__, error=str(error)[:MOST_TEXT])
    reason = error.message if isinstance(error, CuadrillaError) else told
    return reason if len(reason) <= MOST_TEXT else reason[:MOST_TEXT]


def _started(argv: Sequence[str], *, says: bytes | None = None) -> "subprocess.Popen[bytes] | Message":
    """In a process group of its own: Ctrl-C does not reach it, and killing it reaches what it has started."""
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if says is None else subprocess.PIPE,
            stdout=subprocess.DEVNULL if says is None else subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=os.name == "posix",
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        return Message("{program} cannot be started: {reason}", program=argv[0], reason=reason)
    if says is not None:
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.write(says)  # a pipe holds more than that
            child.stdin.close()
    return child


def _problem_in(raw: bytes) -> Message | None:
    """What the process that posts has printed."""
    try:
        said = json.loads(raw)
        problem, detail = said["problem"], one_line(str(said["detail"]), most=MOST_NAME)
    except (ValueError, KeyError, TypeError):
        return Message("the process that sends it has ended without a word")
    match problem:
        case "status":
            return Message("its address answered {detail}", detail=detail)
        case "redirect":
            return Message("its address answered {detail}, which leads elsewhere", detail=detail)
        case "certificate":
            return Message("the certificate of its address is not valid ({detail})", detail=detail)
        case "network":
            return Message("its address cannot be reached ({detail})", detail=detail)
    return None
