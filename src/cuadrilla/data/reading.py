"""How sources are read, and what was passed over meanwhile."""

from collections import Counter
from dataclasses import dataclass, field

from cuadrilla.errors import DataError

DEFAULT_FIELD = "text"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How sources are read."""

    field: str = DEFAULT_FIELD
    """The name of the field or column of a record that holds its text."""
    skip_bad: bool = False
    """Count bad records and broken files and go on, instead of raising."""


@dataclass(kw_only=True)
class Log:
    """What was passed over, and why."""

    reading: Reading
    skipped: list[str] = field(default_factory=list)
    """Names of files that are not text, or broken."""
    counts: Counter[str] = field(default_factory=Counter)
    """Files skipped and records without text, by reason. Hidden files do not count: a `.DS_Store` must not change a
    manifest."""
    broken: dict[str, str] = field(default_factory=dict)
    """Names of what was skipped because it is broken, and why."""

    def skip(self, name: str, reason: str) -> None:
        """Note that `name` is not read."""
        self.counts[reason] += 1
        self.skipped.append(name)

    def refuse(self, name: str, error: DataError) -> None:
        """Raise the error, or note that `name` is passed over."""
        if not self.reading.skip_bad:
            raise error
        self.skip(name, "files_broken")
        self.broken[name] = error.message

    def refuse_record(self, where: str, why: str) -> None:
        """Raise that a record has no text, or count it."""
        if not self.reading.skip_bad:
            hint = "--field NAME reads another field; --skip-bad leaves such records out and counts them"
            raise DataError("{where}: {why}", where=where, why=why, hint=hint)
        self.counts["records_bad"] += 1
