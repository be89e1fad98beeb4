"""Alarms tell a person what happens to a run, by a program of theirs (`[alarm]`). They also record the error of a run
that fails.

    with Alarms(config.alarm, run=run) as alarms:
        ...  # alarms.on_event(kind, fields) for each event

An alarm never delays a run and never makes it fail: a thread sends it, a program is killed after `LIMIT_SECONDS`, and
an error is only a warning. There is no shell: a program gets the message as JSON on its standard input.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from json import dumps
from typing import Any

from cuadrilla.config import AlarmSection
from cuadrilla.errors import ConfigError, CuadrillaError, ResourceError
from cuadrilla.host.programs import run as run_program
from cuadrilla.messages import Message, language
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir, append_event, read_object, write_json

LIMIT_SECONDS = 10.0
PAUSE_SECONDS = 60.0
"""Minimum time between two messages of one kind; those in between are not sent."""
MAX_TEXT = 500

log = logging.getLogger(__name__)


def _alarm_of(kind: str, fields: Mapping[str, Any]) -> tuple[str, Message] | None:
    """The event's name, and the text for a person; None for the many events that are no alarm."""
    reason, step = fields.get("reason") or "", fields.get("version")
    match kind:
        case "finished" if fields.get("complete"):
            return "finished", Message("all {steps} steps are done", steps=step)
        case "finished":
            return "stopped", Message("stopped at step {step}: {reason}", step=step, reason=reason)
        case "failed":
            return "failed", Message("it has failed: {reason}", reason=reason)
        case "left" | "evicted":
            return "left", Message("{worker} has left: {reason}", worker=fields.get("worker"), reason=reason)
        case "alarm":
            return "alarm", Message("{reason}", reason=fields.get("message") or "")
    return None


class Alarms:
    """The alarms of one run, on its coordinator's machine; used by the thread that trains."""

    def __init__(self, section: AlarmSection, *, run: RunDir) -> None:
        self._section, self._run, self._name = section, run, run.path.resolve().name
        self._sender = ThreadPoolExecutor(1, "alarms")
        self._told_at: dict[str, float] = {}
        self._is_over = False

    def __enter__(self) -> "Alarms":
        return self

    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take an event of the run, as in events.jsonl. Never blocks, and raises nothing."""
        if self._is_over or (alarm := _alarm_of(kind, fields)) is None:
            return
        event, said = alarm
        self._is_over, now = event in ("finished", "stopped", "failed"), time.monotonic()
        if now - self._told_at.get(event, -PAUSE_SECONDS) >= PAUSE_SECONDS:
            self._told_at[event] = now
            text = one_line(said.in_language(language()), most=MAX_TEXT)
            moment = datetime.now(tz=UTC).isoformat(timespec="seconds")
            title = f"cuadrilla: {self._name}"
            message = {"event": event, "title": title, "text": text, "run": self._name, "time": moment}
            self._sender.submit(self._send, message)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Write a failure to the run's events, its status and its alarms, and wait until all is sent. A ConfigError is
        left out, because the person who typed the command sees it."""
        if isinstance(error, Exception) and not isinstance(error, ConfigError) and not self._is_over:
            reason = reason_of(error)
            with suppress(ResourceError):  # a full disk is no second failure
                append_event(self._run.events, "failed", reason=reason)
                write_json(self._run.status, {**read_object(self._run.status), "state": "failed"}, private=True)
            self.on_event("failed", {"reason": reason})
        self._sender.shutdown()

    def _send(self, message: Mapping[str, str]) -> None:
        if self._section.command:
            said = dumps(message).encode()
            if not run_program(self._section.command, seconds=LIMIT_SECONDS, stdin=said).ok:
                log.warning("alarm.command did not start, or did not end well in %g s", LIMIT_SECONDS)


def reason_of(error: Exception) -> str:
    """Why a run failed, for a person who reads it in an alarm and in the run's events: MAX_TEXT characters at most."""
    template = Message("{kind}: {error}", kind=type(error).__name__, error=error)
    reason = error.message if isinstance(error, CuadrillaError) else template
    return reason if len(reason) <= MAX_TEXT else reason[:MAX_TEXT]
