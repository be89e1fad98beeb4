"""The errors that a user can cause, as one tree of exceptions. Our own invariants are `assert`s.

Every error has a `message` (the cause) and a `hint` (what to do), one line each. Both are templates with fields
(`messages.py`), so that they can be translated for a person and compared by a program. The CLI prints an error and
exits with its `exit_code`.
"""

from cuadrilla.messages import Message

INTERRUPTED_EXIT_CODE = 130


class CuadrillaError(Exception):
    """Base of the tree. `message` says what went wrong and where, `hint` says what to type or change.

    Both are templates, filled with the same `fields`; each may name some of them.
    """

    exit_code = 1

    def __init__(self, message: str, /, *, hint: str = "", **fields: object) -> None:
        self.message, self.hint = Message(message, **fields), Message(hint, **fields)
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
    """A device is missing, broken, or cannot do what was asked of it."""


class DataError(CuadrillaError):
    """Text, tokens or a tokenizer that cannot be used."""

    exit_code = 4


class LinkError(CuadrillaError):
    """The coordinator cannot be reached, or refuses us."""

    exit_code = 5


class CheckpointError(CuadrillaError):
    """No checkpoint passes verification, or the checkpoint has another model or a newer format."""

    exit_code = 6


class GuardError(CuadrillaError):
    """A training guard stopped the run: the loss diverged and rolling back did not help."""

    exit_code = 7


class ResourceError(CuadrillaError):
    """Disk or memory ran out, or is too short to start."""

    exit_code = 8
