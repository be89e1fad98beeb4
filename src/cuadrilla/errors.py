"""What can go wrong, as one tree.

Every error carries `message` (the cause, one line) and `hint` (what to do, one line): templates with fields
(`messages.py`), so that they can be shown in another language and read by a program. Raised for what a user can cause;
our own invariants are `assert`s. The CLI prints them and exits with `exit_code`; nothing else catches the tree as a
whole.
"""

import string
from collections.abc import Mapping

from cuadrilla.messages import Message

INTERRUPTED_EXIT_CODE = 130


class CuadrillaError(Exception):
    """Base of everything a user can cause. `message` says what and where, `hint` what to type or change.

    Both are templates, of which each takes its own of the `fields`.
    """

    exit_code = 1

    def __init__(self, message: str, /, *, hint: str = "", **fields: object) -> None:
        self.message = Message(message, **_of(fields, message))
        self.hint = Message(hint, **_of(fields, hint))
        super().__init__(self.message)
        if hint:
            self.add_note(f"hint: {self.hint}")  # what a traceback shows, in a script or a notebook


class ConfigError(CuadrillaError):
    """A run file, a flag or a `--set` that cannot be used as written."""

    exit_code = 2


class TaskError(CuadrillaError):
    """A user's task file that cannot be loaded or breaks the `Task` protocol."""

    exit_code = 2


class EnvironmentProblem(CuadrillaError):
    """This machine or this installation lacks something."""

    exit_code = 3


class DeviceError(EnvironmentProblem):
    """A device is missing, sick, or cannot do what was asked of it."""


class DataError(CuadrillaError):
    """Text, tokens or a tokenizer that cannot be used."""

    exit_code = 4


class LinkError(CuadrillaError):
    """The coordinator cannot be reached, or refuses us."""

    exit_code = 5


class CheckpointError(CuadrillaError):
    """No checkpoint verifies, or it belongs to another model or a newer format."""

    exit_code = 6


class GuardError(CuadrillaError):
    """A training guard stopped the run: the loss diverged and rolling back did not help."""

    exit_code = 7


class ResourceError(CuadrillaError):
    """Disk or memory ran out, or is too short to start."""

    exit_code = 8


def _of(fields: Mapping[str, object], template: str) -> dict[str, object]:
    """Those that the template names; none if it is a text of others, with braces of their own."""
    if isinstance(template, Message) or not fields:
        return {}
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    except ValueError:
        return {}
    return {name: value for name, value in fields.items() if name in named}
