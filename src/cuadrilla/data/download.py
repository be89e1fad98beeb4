"""One file into a folder: fetched, hashed, recorded.

Invariants
* A file with its name in the folder is complete, and was checked against every hash that is known. Until then it is a
  hidden part, which `data prepare` does not see.
* What came is kept, whatever ends the download, if the server allows to go on from there and it did not prove wrong.
* The order at the end is: part durable, record durable, rename. A crash between any two is cured by the next run.
* One process per folder, by a lock.
"""

import os
import posixpath
import re
import shutil
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from cuadrilla.data.record import RECORD, UNKNOWN, DownloadRecord, read_records
from cuadrilla.data.web import Part, Progress, Report, receive
from cuadrilla.errors import DataError
from cuadrilla.printable import one_line
from cuadrilla.rundir import FolderLock, file_sha256, fsync_folder, storage_errors, write_json

MAX_NAME = 150
MAX_LICENCE = 200
_NOT_IN_NAMES = re.compile(r"[^\w .,;()+=&'!@#$%~\[\]{}-]")


@dataclass(frozen=True, kw_only=True)
class DownloadRequest:
    """A file to fetch, and what is known about it beforehand."""

    url: str
    """What is recorded; also tells one download from another."""
    name: str = ""
    """How to call it; else as the server does, or as the address ends."""
    subfolder: str = ""
    licence: str = UNKNOWN
    sha256: str = ""
    token: str = field(default="", repr=False)
    """Of the hub's account; sent to the host of `url` only."""
    inside: str = ""
    """The folder in a zip archive of which the files are wanted; empty to keep the file as it is."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What there is of one address."""

    records: Sequence[DownloadRecord]
    folder: Path
    already: bool
    """It was there before, and its hash is right."""


def fetch(wanted: DownloadRequest, *, to: Path, progress: Progress, report: Report = lambda _text: None) -> Fetched:
    """Bring one file to `to`, or find it there.

    Raises LinkError when the server does not give it, DataError when it gives something else, ResourceError for the
    disk, ConfigError when another process fetches to `to`.
    """
    folder = to / wanted.subfolder
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder / ".lock", purpose="`cuadrilla data get`"):
        records = read_records(folder)
        here = _present([row for row in records if row.url == wanted.url], folder)
        if here and wanted.sha256 in ("", *(row.sha256 for row in here)):
            return Fetched(records=here, folder=folder, already=True)
        part = Part(folder, url=wanted.url)
        try:
            name = receive(wanted.url, part, token=wanted.token, progress=progress, report=report)
            rows = _settle(wanted, part.path, records, folder=folder, name=safe_name(wanted.name or name))
        except BaseException as failure:
            if isinstance(failure, DataError) or not part.validator:  # it is wrong, or cannot be gone on from
                part.discard()
            raise
        part.discard()
    return Fetched(records=rows, folder=folder, already=False)


def _present(rows: list[DownloadRecord], folder: Path) -> list[DownloadRecord]:
    """The same records if all their files are here. Raises DataError if one has changed since."""
    if not all((folder / row.name).is_file() for row in rows):
        return []
    for row in rows:
        path = folder / row.name
        if file_sha256(path) != row.sha256:
            raise DataError(
                "{path} is not what was fetched: it was changed or damaged",
                path=path,
                hint="delete it and run the same command to fetch it again",
            )
    return rows


def _settle(
    wanted: DownloadRequest, part: Path, records: list[DownloadRecord], *, folder: Path, name: str
) -> Sequence[DownloadRecord]:
    """Check and record it, then give the file its name, or those of what it holds."""
    sha256 = file_sha256(part)
    if wanted.sha256 not in ("", sha256):
        raise DataError(
            "{url}: {name} has SHA-256 {found}, not {expected}",
            url=wanted.url,
            name=name,
            found=sha256,
            expected=wanted.sha256,
            hint="the download was discarded; this is not the file you want",
        )
    unpacked = part.with_suffix(".unpacked")
    own = {row.name for row in records if row.url == wanted.url}
    try:
        files = _unpacked(part, unpacked, inside=wanted.inside) if wanted.inside else {name: part}
        for each in files.keys() - own:
            if (folder / each).exists():
                raise DataError(
                    "{path} is already there, and did not come from {url}",
                    path=folder / each,
                    url=wanted.url,
                    hint="move it away, or choose another folder with --to",
                )
        rows = [
            DownloadRecord(
                url=wanted.url,
                name=each,
                licence=one_line(wanted.licence, most=MAX_LICENCE),
                num_bytes=path.stat().st_size,
                sha256=file_sha256(path) if wanted.inside else sha256,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            for each, path in files.items()
        ]
        others = [row for row in records if row.url != wanted.url]
        write_json(folder / RECORD, {"files": [asdict(row) for row in [*others, *rows]]})
        with storage_errors(folder):
            for each, path in files.items():
                os.replace(path, folder / each)
            fsync_folder(folder)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return rows


def _unpacked(archive: Path, folder: Path, *, inside: str) -> dict[str, Path]:
    """The files of the folder `inside`, below the one that the archives of repositories begin with, by name.

    Raises DataError, ResourceError.
    """
    found: dict[str, Path] = {}
    try:
        with storage_errors(folder), zipfile.ZipFile(archive) as opened:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for member in opened.infolist():
                parts = PurePosixPath(member.filename).parts
                if len(parts) != 3 or parts[1] != inside or member.is_dir():
                    continue
                found[safe_name(parts[2])] = path = folder / safe_name(parts[2])
                with opened.open(member) as source, open(path, "wb") as file:
                    shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        hint = "the download is not the expected archive; try again"
        raise DataError("the archive cannot be unpacked: {error}", error=error, hint=hint) from error
    return found


def safe_name(text: str) -> str:
    """A file name that stays in its folder and is a plain, visible name on every system, whatever `text` is."""
    name = unicodedata.normalize("NFC", text).replace("\\", "/").rpartition("/")[2]
    stem, suffix = os.path.splitext(_NOT_IN_NAMES.sub("_", name).strip(" .") or "download")
    name = stem[:MAX_NAME].rstrip(" .") + suffix[:20]
    return f"_{name}" if name.lower() == RECORD.lower() else name


def names_below(paths: Iterable[str]) -> dict[str, str]:
    """For each path a file name that tells it from the others: what is below their common folder."""
    paths = list(paths)
    common = posixpath.commonpath(map(posixpath.dirname, paths))
    return {path: safe_name(posixpath.relpath(path, common or ".").replace("/", "_")) for path in paths}
