"""What the readers of records (JSON Lines, Parquet) share: which field is the text, and what a bad record is."""

from dataclasses import dataclass

from cuadrilla.errors import DataError
from cuadrilla.messages import Message

DEFAULT_FIELD = "text"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How records are read."""

    field: str = DEFAULT_FIELD
    """The name of the field or column that holds the text."""
    repair: bool = False
    """Put right what was encoded twice, and read files of two encodings line by line. Needs ftfy."""
    skip_bad: bool = False
    """Count a bad record, or a broken file, and go on, instead of raising."""


class BadFileError(DataError):
    """What a text holds is not what its name says. One in an archive says nothing about its neighbours."""


class BadRecord(Exception):
    """A record without a usable text; never leaves the readers."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        """Under which name it is counted."""

    @property
    def is_broken(self) -> bool:
        """It could not even be read as a record."""
        return self.reason == "records_broken"

    @property
    def hint(self) -> str:
        """What to type."""
        if self.reason == "records_without_field":
            return Message("--field NAME reads another field, --skip-bad leaves such records out and counts them")
        return Message("repair it, or leave such records out with --skip-bad, which counts them")
