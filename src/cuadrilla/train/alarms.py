"""Tells a person what happens to a run: starts a program of theirs, or writes to their addresses (`[alarm]`).

    with Alarms(config.alarm, run=run) as alarms:
        ...  # alarms.hear(kind, fields) for each event

Invariants
* A run is never held up and never fails by this. `hear` only enqueues, `MAX_WAITING` messages at most; a thread runs
  one program after the other for each message and kills it after `LIMIT_SECONDS`. What goes wrong is a warning in the
  log, the same thing again a line of the log's file only.
* At the end only the last message (finished, stopped, failed) is waited for, as long as its programs may take.
* No shell. A program gets the message as JSON on its standard input, and nothing of it in its arguments.
* Addresses are read from their file by the process that writes to them; they are in no argument, log or run file.
"""

import importlib.util
import json
import logging
import math
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from cuadrilla.config import AlarmSection
from cuadrilla.errors import ConfigError, CuadrillaError
from cuadrilla.host.programs import run as run_program
from cuadrilla.messages import Message, language
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, require_regular, typed
from cuadrilla.runfile import has_begun

LIMIT_SECONDS = 10.0
"""For one program and one message."""
MOMENT_SECONDS = 2.0
MAX_WAITING = 8
MAX_TEXT, MAX_NAME = 500, 100
FINAL = ("finished", "stopped", "failed")

log = logging.getLogger(__name__)


def message_of(kind: str, fields: Mapping[str, Any], *, run: str) -> dict[str, str] | None:
    """What a person is told of an event of a run, each value one line; None for most events."""
    said = _said_of(kind, fields, run=run)
    if said is None:
        return None
    event, title, text = said
    shown = {
        name: one_line(each.in_language(language()), most=MAX_TEXT) for name, each in (("title", title), ("text", text))
    }
    return {**shown, "run": run, "event": event, "time": datetime.now(tz=UTC).isoformat(timespec="seconds")}


def _said_of(kind: str, fields: Mapping[str, Any], *, run: str) -> tuple[str, Message, Message] | None:
    """(event as `alarm.on` has it, title, text)."""
    worker = one_line(str(fields.get("worker", "")), most=MAX_NAME)
    reason, step = fields.get("reason") or "", fields.get("version")
    match kind:
        case "finished" if fields.get("complete"):
            text = Message("{run}: all {steps} steps are done", run=run, steps=step)
            return "finished", Message("cuadrilla: {run} has finished", run=run), text
        case "finished":
            text = Message("{run}: stopped at step {step}: {reason}", run=run, step=step, reason=reason)
            return "stopped", Message("cuadrilla: {run} has stopped", run=run), text
        case "failed":
            text = Message("{run}: {reason}", run=run, reason=reason)
            return "failed", Message("cuadrilla: {run} has failed", run=run), text
        case "left" | "evicted":
            text = Message("{run}: {worker} has left", run=run, worker=worker)
            text = Message("{text}: {reason}", text=text, reason=reason) if reason else text
            return "left", Message("cuadrilla: {run}: a worker has left", run=run), text
        case "late":
            text = Message("{run}: {worker} is late; others are given its work, too", run=run, worker=worker)
            return "late", Message("cuadrilla: {run}: a worker is late", run=run), text
        case "alarm":
            text = Message("{run}: {reason}", run=run, reason=fields.get("message") or "")
            return "alarm", Message("cuadrilla: {run}: a file could not be written", run=run), text
    return None


def check_addresses(path: Path) -> None:
    """Raises ConfigError where the file of addresses cannot be used."""
    hint = "write addresses into that file, one a line, or leave alarm.address_file out"
    try:
        require_regular(path)
        status = path.stat()
    except OSError as error:
        raise ConfigError("cannot read {path}: {reason}", path=path, reason=error.strerror, hint=hint) from error
    if os.name == "posix" and (status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077):
        told = "others may read the addresses in {path}"
        raise ConfigError(told, path=path, hint="chmod 600 {file}", file=typed(path))
    if importlib.util.find_spec("apprise") is None:
        raise ConfigError("alarm.address_file needs apprise", hint='pip install "cuadrilla[alarm]"')


class Alarms:
    """Of one run on its coordinator's machine; for the thread that trains."""

    def __init__(self, section: AlarmSection, *, run: RunDir, limit_seconds: float = LIMIT_SECONDS) -> None:
        """Raises ConfigError for an `address_file` that a new run cannot use; one that goes on is only warned."""
        self._section, self._limit_seconds = section, limit_seconds
        self._run = one_line(run.path.resolve().name, most=MAX_NAME)
        self._programs: dict[str, list[str]] = {"alarm.command": section.command} if section.command else {}
        self._waiting: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
        self._told_at: dict[str, float] = {}
        self._warned: set[str] = set()
        self._is_over = self._is_given_up = False
        self._cut_at = math.inf
        self._thread = threading.Thread(target=self._work, name="alarms", daemon=True)
        if section.address_file:
            path = run.path / section.address_file
            # -P: a file json.py in the folder where somebody works must not stand in for the real one.
            self._programs["alarm.address_file"] = [sys.executable, "-P", "-m", "cuadrilla.train.notify", str(path)]
            try:
                check_addresses(path)
            except ConfigError as error:
                if not has_begun(run):
                    raise
                self._warn(error.message)

    def __enter__(self) -> "Alarms":
        self._thread.start()
        return self

    def hear(self, kind: str, fields: Mapping[str, Any]) -> None:
        """An event of the run, as it is in its events. Waits for nothing, and raises nothing."""
        message = message_of(kind, fields, run=self._run) if self._programs and not self._is_over else None
        if message is not None:
            event = message["event"]
            self._is_over = event in FINAL
            if event in self._section.on and (self._is_over or self._has_room(event)):
                self._waiting.put(message)

    def _has_room(self, event: str) -> bool:
        """Not within `least_seconds` of another message of the kind, nor where many wait."""
        now = time.monotonic()
        if now - self._told_at.get(event, -math.inf) < self._section.least_seconds:
            return False
        self._told_at[event] = now
        return self._waiting.qsize() < MAX_WAITING

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Tell of a failure, unless it is in what was typed, and wait for the last message."""
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            self.hear("failed", {"reason": reason_of(error)})
        self._is_over, self._cut_at = True, time.monotonic() + MOMENT_SECONDS
        self._waiting.put(None)
        try:
            self._thread.join(len(self._programs) * self._limit_seconds + 2 * MOMENT_SECONDS)
        finally:  # also after a second Ctrl-C
            self._is_given_up = True
            self._thread.join(MOMENT_SECONDS)

    # -- in its thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        for message in iter(self._waiting.get, None):
            if message["event"] in FINAL or self._cut_at == math.inf:
                self._send(message)

    def _send(self, message: Mapping[str, str]) -> None:
        """What is not the last message has a moment once the run is over."""
        problems, is_last, said = list[Message](), message["event"] in FINAL, json.dumps(message).encode()

        def stop() -> bool:
            return self._is_given_up or (not is_last and time.monotonic() > self._cut_at)

        for name, argv in self._programs.items():
            answer = run_program(argv, seconds=self._limit_seconds, stdin=said, stop=stop)
            if answer is None:
                problems.append(Message("{program} cannot be started", program=name))
            elif answer.code is None:
                told = "{program} took more than {seconds:g} s"
                problems.append(Message(told, program=name, seconds=self._limit_seconds))
            elif answer.code:
                problems.append(Message("{program} ended with exit code {code}", program=name, code=answer.code))
        for problem in problems:
            self._warn(problem)
        if not problems:
            self._warned.clear()

    def _warn(self, problem: Message) -> None:
        level = logging.INFO if problem in self._warned else logging.WARNING
        self._warned.add(problem)
        log.log(level, "a message of [alarm] was not sent: %s", problem)


def reason_of(error: Exception) -> str:
    """Why a run failed: a person reads it in the alarm and in the run's events, so it has an end."""
    told = Message("{kind}: {error}", kind=type(error).__name__, error=str(error)[:MAX_TEXT])
    reason = error.message if isinstance(error, CuadrillaError) else told
    return reason if len(reason) <= MAX_TEXT else reason[:MAX_TEXT]
