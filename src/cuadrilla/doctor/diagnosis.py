"""What a check says: all is well, a warning or a failure; its cause, and the one command that repairs it."""

import shlex
import sys
from dataclasses import dataclass
from typing import Literal

from cuadrilla.messages import Message

Level = Literal["ok", "warning", "failure"]
Shell = Literal["here", "powershell", "administrator", "coordinator", "host"]

PLACES: dict[Shell, Message] = {
    "here": Message("type here"),
    "powershell": Message("in PowerShell of Windows"),
    "administrator": Message("in PowerShell of Windows, as administrator"),
    "coordinator": Message("on the coordinator's machine"),
    "host": Message("on the machine that runs this container"),
}
"""Where a command is to be typed."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`command` is typed as it stands, in `shell`; `remedy` says what no command does, or what to know about it."""

    level: Level
    cause: str
    remedy: str = ""
    command: str = ""
    shell: Shell = "here"


def ok(cause: str) -> Diagnosis:
    return Diagnosis(level="ok", cause=cause)


def warn(cause: str, *, remedy: str = "", command: str = "", shell: Shell = "here") -> Diagnosis:
    return Diagnosis(level="warning", cause=cause, remedy=remedy, command=command, shell=shell)


def fail(cause: str, *, remedy: str = "", command: str = "", shell: Shell = "here") -> Diagnosis:
    return Diagnosis(level="failure", cause=cause, remedy=remedy, command=command, shell=shell)


def as_root(command: str, *, is_root: bool) -> str:
    """With `sudo` in front for whoever is not root."""
    return command if is_root else f"sudo {command}"


def pip(arguments: str, *, python: str) -> str:
    """Pip of the Python that runs cuadrilla: another one would install beside it."""
    return f"{shlex.quote(python)} -m pip {arguments}"


def set_clock(*, is_root: bool) -> str:
    """The command that sets this machine's clock."""
    if sys.platform == "darwin":
        return "sudo sntp -sS time.apple.com"
    return "w32tm /resync" if sys.platform == "win32" else as_root("timedatectl set-ntp true", is_root=is_root)
