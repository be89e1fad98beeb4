"""What the web and the object stores have in common: a file from some byte on, with what tells it from a later one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from cuadrilla.errors import LinkError
from cuadrilla.messages import Message


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Bytes on their way. `chunks` raises PassingError for what another try may cure."""

    start: int
    """Of the first byte in `chunks`, in the file."""
    total_bytes: int | None
    """Of the whole file, as announced."""
    validator: str
    """What tells this content from a later one at the same address; empty if nothing does, then it cannot resume."""
    chunks: Iterator[bytes]
    close: Callable[[], None]
    name: str = ""
    """What the other side calls the file, unchecked."""
    media_type: str = ""


class Origin(Protocol):
    """One file somewhere else."""

    def open(self, offset: int, validator: str) -> Stream:
        """From `offset` if the content is still that of `validator`, else from 0.

        Raises PassingError for what another try may cure, LinkError for the rest.
        """


class PassingError(LinkError):
    """A failure that may be gone at the next try."""

    def __init__(self, message: str, /, *, wait_seconds: float = 0.0, **fields: Any) -> None:
        hint = Message("check this machine's network, then run the same command again")
        super().__init__(message, hint=hint, **fields)
        self.wait_seconds = wait_seconds
