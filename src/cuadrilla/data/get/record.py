"""`SOURCE.json` beside the data: for each file where it came from, under which licence, its bytes, hash and date.

Where nobody knew the hash of a file beforehand, that is recorded (`first use`). `data prepare` takes licences from
here, by the hash of a file: one that was changed since is not what the licence was given for.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import file_sha256, write_json

RECORD = "SOURCE.json"
UNKNOWN = "unknown"
FIRST_USE = "first use"
MAX_LICENCE = 200


@dataclass(frozen=True, kw_only=True)
class DownloadRecord:
    """One file that was fetched, or taken out of an archive that was."""

    url: str
    name: str
    licence: str
    num_bytes: int
    sha256: str
    vouched_by: str
    """`option`, `hub`: who knew the hash beforehand; `first use`: nobody did."""
    date: str
    """UTC, ISO 8601."""


class Records:
    """The records of one folder, as on disk."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError if there is a record that cannot be read: it must not be overwritten."""
        self._folder = folder
        self._rows = _read(folder / RECORD)

    def of(self, url: str) -> list[DownloadRecord]:
        return [row for row in self._rows if row.url == url]

    def put(self, url: str, rows: Sequence[DownloadRecord]) -> None:
        """Add or replace those of an address, durably. Raises ResourceError."""
        self._rows = [*(row for row in self._rows if row.url != url), *rows]
        write_json(self._folder / RECORD, {"files": [asdict(row) for row in self._rows]})

    def present(self, url: str) -> list[DownloadRecord]:
        """The records of an address if all its files are here. Raises DataError if one has changed since."""
        rows = self.of(url)
        if not all((self._folder / row.name).is_file() for row in rows):
            return []
        for row in rows:
            path = self._folder / row.name
            if file_sha256(path) != row.sha256:
                raise DataError(
                    "{path} is not what was fetched: it was changed or damaged",
                    path=path,
                    hint="delete it and run the same command to fetch it again",
                )
        return rows

    def claim(self, name: str, *, url: str) -> None:
        """Raises DataError if writing `name` would overwrite something that did not come from `url`."""
        path = self._folder / name
        if path.exists() and name not in [row.name for row in self.of(url)]:
            raise DataError(
                "{path} is already there, and did not come from {url}",
                path=path,
                url=url,
                hint="move it away, or choose another folder with --to",
            )


def licences(folder: Path) -> dict[str, str]:
    """What the record of a folder says about its files, by their SHA-256; nothing if there is none of ours."""
    try:
        return {row.sha256: one_line(str(row.licence)) for row in _read(folder / RECORD)}
    except DataError:
        return {}


def one_line(text: str) -> str:
    """A licence as it may be shown and written: hubs and users say what they like."""
    return " ".join(text.encode(errors="replace").decode().split())[:MAX_LICENCE] or UNKNOWN


def _read(path: Path) -> list[DownloadRecord]:
    """Nothing if there is no file. Raises DataError for one that is not a record of ours."""
    try:
        return [DownloadRecord(**row) for row in json.loads(path.read_bytes())["files"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        hint = Message("move {path} away to fetch everything again, or choose another folder with --to", path=path)
        raise DataError("{path} cannot be read: {error}", path=path, error=error, hint=hint) from error
