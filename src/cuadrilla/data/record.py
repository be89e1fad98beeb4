"""`SOURCE.json` beside downloaded data: their address, licence and date, and the hash of each file.

`data prepare` reads licences from it.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from cuadrilla.errors import DataError
from cuadrilla.messages import Message

RECORD = "SOURCE.json"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class DownloadRecord:
    """One download: a file, or the files that were unpacked from an archive."""

    url: str
    licence: str
    date: str
    """UTC, ISO 8601."""
    files: dict[str, str]
    """The SHA-256 of each file, by name."""


def read_record(folder: Path) -> DownloadRecord | None:
    """The record of a folder; None if it has no `SOURCE.json`. Raises DataError if that cannot be read."""
    path = folder / RECORD
    try:
        return TypeAdapter(DownloadRecord).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        hint = Message("move {path} away to fetch everything again, or choose another folder with --to", path=path)
        raise DataError("{path} cannot be read: {error}", path=path, error=error, hint=hint) from error
