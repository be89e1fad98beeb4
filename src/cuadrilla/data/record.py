"""`SOURCE.json` beside downloaded data: for each file its address, licence, size, hash and date.

`data prepare` reads licences from it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.errors import DataError
from cuadrilla.messages import Message

RECORD = "SOURCE.json"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class DownloadRecord:
    """One file that was downloaded, or unpacked from a downloaded archive."""

    url: str
    name: str
    licence: str
    num_bytes: int
    sha256: str
    date: str
    """UTC, ISO 8601."""


def read_records(folder: Path) -> list[DownloadRecord]:
    """The records of a folder; none if it has no `SOURCE.json`. Raises DataError if that cannot be read."""
    path = folder / RECORD
    try:
        return [DownloadRecord(**row) for row in json.loads(path.read_bytes())["files"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        hint = Message("move {path} away to fetch everything again, or choose another folder with --to", path=path)
        raise DataError("{path} cannot be read: {error}", path=path, error=error, hint=hint) from error
