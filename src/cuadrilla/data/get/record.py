"""`SOURCE.json` beside the data: for each file where it came from, under which licence, its bytes, hash and date.

The hash of a file whose content nobody vouched for is trusted on first use: it is recorded as such, and a later fetch
from the same address must give the same bytes. `data prepare` takes licences from here, by the hash of a file: one that
was changed since is not what the licence was given for.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from cuadrilla.data.get.address import RECORD
from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import SCHEMA, file_sha256, read_regular, remove_leftovers, write_json

UNKNOWN = "unknown"
MAX_LICENCE = 200


@dataclass(frozen=True, kw_only=True)
class DownloadRecord:
    """One address that was fetched."""

    url: str
    name: str
    licence: str
    num_bytes: int
    sha256: str
    vouched_by: str
    """`option`, `hub`: who knew the hash beforehand; `first use`: nobody did."""
    date: str
    """UTC, ISO 8601."""
    revision: str = ""
    unpacked: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files that were taken out of an archive, by name; the archive itself is not kept."""


@dataclass(frozen=True)
class _Content:
    schema: Annotated[int, Field(ge=SCHEMA, le=SCHEMA)]
    files: list[DownloadRecord]


class Records:
    """The records of one folder, as on disk."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError if there is a record that cannot be read: it must not be overwritten."""
        self._folder = folder
        self._path = folder / RECORD
        remove_leftovers(self._path)
        self._records = {record.url: record for record in _read(self._path)}

    def of(self, url: str) -> DownloadRecord | None:
        return self._records.get(url)

    def put(self, record: DownloadRecord) -> None:
        """Add or replace, durably. Raises ResourceError."""
        self._records[record.url] = record
        write_json(self._path, {"files": [asdict(each) for each in self._records.values()]})

    def present(self, url: str) -> DownloadRecord | None:
        """The record of an address whose files are all here. Raises DataError if one has changed since."""
        record = self.of(url)
        if record is None:
            return None
        for name, sha256 in (record.unpacked or {record.name: record.sha256}).items():
            path = self._folder / name
            if not path.is_file():
                return None
            if file_sha256(path) != sha256:
                raise DataError(
                    "{path} is not what was fetched: it was changed or damaged",
                    path=path,
                    hint="delete it and run the same command to fetch it again, or remove its entry in {record}",
                    record=self._path,
                )
        return record

    def claim(self, name: str, *, url: str) -> None:
        """Raises DataError if writing `name` would overwrite something that did not come from `url`."""
        owner = next((each for each in self._records.values() if name in (each.unpacked or (each.name,))), None)
        if owner is not None and owner.url != url:
            raise DataError(
                "{path} came from another address, {url}",
                path=self._folder / name,
                url=owner.url,
                hint="choose another folder with --to",
            )
        if owner is None and (self._folder / name).exists():
            raise DataError(
                "{path} is already there, and was not fetched by cuadrilla",
                path=self._folder / name,
                hint="move it away, or choose another folder with --to",
            )


def licences(folder: Path) -> dict[str, str]:
    """What the record of a folder says about its files, by their SHA-256; nothing if there is none of ours."""
    try:
        records = _read(folder / RECORD)
    except DataError:
        return {}
    return {sha256: one_line(row.licence) for row in records for sha256 in (row.sha256, *row.unpacked.values())}


def one_line(text: str) -> str:
    """A licence as it may be shown and written: hubs and users say what they like."""
    return " ".join(text.encode(errors="replace").decode().split())[:MAX_LICENCE] or UNKNOWN


def _read(path: Path) -> list[DownloadRecord]:
    """Nothing if there is no file. Raises DataError for one that is not a record of ours."""
    try:
        return TypeAdapter(_Content).validate_python(json.loads(read_regular(path)), strict=False).files
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        hint = Message("move {path} away to fetch everything again, or choose another folder with --to", path=path)
        raise DataError("{path} cannot be read: {error}", path=path, error=reason, hint=hint) from error
