"""`SOURCE.json` beside the data: for each file where it came from, under which licence, its bytes, hash and date.

`data prepare` takes licences from here.
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
    """One file that was fetched, or taken out of an archive that was."""

    url: str
    name: str
    licence: str
    num_bytes: int
    sha256: str
    date: str
    """UTC, ISO 8601."""


def read_records(folder: Path) -> list[DownloadRecord]:
    """The records of a folder, none if there is no file. Raises DataError for one that is not ours."""
    path = folder / RECORD
    try:
        return [DownloadRecord(**row) for row in json.loads(path.read_bytes())["files"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        hint = Message("move {path} away to fetch everything again, or choose another folder with --to", path=path)
        raise DataError("{path} cannot be read: {error}", path=path, error=error, hint=hint) from error
