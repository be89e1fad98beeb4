"""The result of a check: all is well, a warning or a failure; the cause, and the one command that repairs it."""

from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Finding:
    """`command`: what to type in `shell`, as it stands. `remedy`: what no command can do, or a note on the command."""

    level: Level
    cause: str
    remedy: str = ""
    command: str = ""
    shell: Shell = "here"


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "failure")
