"""One file from an origin into a folder: resumed, retried, measured, hashed, recorded.

Invariants
* A file with its name in the folder is complete, and was checked against every length and hash that is known. Until
  then it is a hidden part, which `data prepare` does not see: `.KEY.part`, and beside it `.KEY.json` with what tells
  its content from a later one.
* What came is kept, whatever ends the download, if the server allows to go on from there and it did not prove wrong.
* The order at the end is: part durable, record durable, rename. A crash between any two is cured by the next run.
* One process per folder, by a lock.
"""

import hashlib
import json
import os
import random
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO

from cuadrilla.data.formats.packing import MAX_UNPACKED_BYTES
from cuadrilla.data.get.address import name_in, safe_name
from cuadrilla.data.get.record import DownloadRecord, Records, one_line
from cuadrilla.data.get.stream import Origin, PassingError, Stream
from cuadrilla.errors import ConfigError, DataError, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, file_sha256, fsync_folder, remove_leftovers, storage_errors, write_json

LARGE_BYTES = 100 * 10**6
ENOUGH_BYTES = 2**16
"""A try that brought so much is progress: the count of tries begins anew."""
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!doctype html|<html[\s>])", re.IGNORECASE)
_PAGES = (".html", ".htm", ".xhtml")

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all or 0)."""


class TooLargeError(ConfigError):
    """More than may be fetched without asking."""


@dataclass(frozen=True, kw_only=True)
class DownloadRequest:
    """A file to fetch, and what is known about it beforehand."""

    origin: Origin
    url: str
    """What is recorded; also tells one download from another."""
    name: str = ""
    """How to call it; else as the server does, or as the address ends."""
    subfolder: str = ""
    licence: str = "unknown"
    num_bytes: int | None = None
    """Exactly."""
    sha256: str = ""
    vouched_by: str = "first use"
    revision: str = ""
    inside: str = ""
    """The folder in a zip archive of which the files are wanted; empty to keep the file as it is."""


@dataclass(frozen=True, kw_only=True)
class DownloadPolicy:
    """How a download behaves. Tests bring their own patience."""

    limit_bytes: int | None = LARGE_BYTES
    """What may be fetched without asking; None: anything."""
    max_tries: int = 6
    first_wait_seconds: float = 1.0
    sleep: Callable[[float], object] = time.sleep
    progress: Progress = lambda _stage, _done, _total: None
    report: Callable[[str], object] = lambda _text: None


@dataclass(frozen=True, kw_only=True)
class Fetched:
    record: DownloadRecord
    folder: Path
    already: bool
    """It was there before, and its hash is right."""


class Part:
    """The beginning of a file that is on its way."""

    def __init__(self, folder: Path, *, url: str) -> None:
        key = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:16]
        self.path, self._state = folder / f".{key}.part", folder / f".{key}.json"
        remove_leftovers(self._state)
        try:
            state = json.loads(self._state.read_bytes())
            self.validator, self.name = str(state["validator"]), str(state["name"])
        except (OSError, ValueError, KeyError, TypeError):
            self.validator = self.name = ""
        if not self.validator:
            self.path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def open(self, stream: Stream, *, name: str) -> IO[bytes]:
        """The file to go on with; a stream that starts at 0 makes what is here void. Raises ResourceError."""
        self.validator, self.name = stream.validator, name
        write_json(self._state, {"validator": self.validator, "name": name})
        return open(self.path, "ab" if stream.start else "wb", buffering=0)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)


def fetch(wanted: DownloadRequest, *, to: Path, policy: DownloadPolicy) -> Fetched:
    """Bring one file to `to`, or find it there.

    Raises TooLargeError before or when `limit_bytes` is passed, LinkError when the origin does not give it, DataError
    when it gives something else, ResourceError for the disk, ConfigError when another process fetches to `to`.
    """
    folder = to / wanted.subfolder
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder / ".lock", purpose="`cuadrilla data get`"):
        records = Records(folder)
        policy.progress(Message("looking for {name}", name=wanted.name or name_in(wanted.url)), 0, 0)
        here = records.present(wanted.url)
        if here is not None and wanted.sha256 in ("", here.sha256):
            return Fetched(record=here, folder=folder, already=True)
        part = Part(folder, url=wanted.url)
        try:
            name = _receive(wanted, part, records, policy=policy)
            sha256 = file_sha256(part.path)
            _check_whole(wanted, part, records.of(wanted.url), name=name, sha256=sha256)
            record = _settle(wanted, part, records, folder=folder, name=name, sha256=sha256)
        except BaseException as failure:
            if not part.validator or isinstance(failure, DataError):
                part.discard()
            raise
        part.discard()
    return Fetched(record=record, folder=folder, already=False)


def _receive(wanted: DownloadRequest, part: Part, records: Records, *, policy: DownloadPolicy) -> str:
    """All bytes into the part, over as many tries as it takes; the file's name."""
    furthest, tries = part.num_bytes, 0
    while True:
        try:
            stream = wanted.origin.open(part.num_bytes, part.validator)
            try:
                resumed = part.name if stream.start else ""
                name = wanted.name or resumed or safe_name(stream.name or name_in(wanted.url))
                records.claim(name, url=wanted.url)
                _check_limit(wanted.url, stream.total_bytes or 0, policy)
                _pour(wanted, stream, part, name=name, policy=policy)
            finally:
                stream.close()
            return name
        except PassingError as problem:
            tries = 1 if part.num_bytes >= furthest + ENOUGH_BYTES else tries + 1
            furthest = max(furthest, part.num_bytes)
            if tries >= policy.max_tries:
                raise LinkError(
                    "{url}: {problem} ({tries} tries in a row)",
                    url=wanted.url,
                    problem=problem.message,
                    tries=tries,
                    hint="what has arrived is kept if the server can resume; run the same command later",
                ) from problem
            wait = max(problem.wait_seconds, policy.first_wait_seconds * 2 ** (tries - 1) * random.uniform(0.5, 1.5))
            policy.report(Message("{problem}; trying again in {wait:.0f} s", problem=problem.message, wait=wait))
            policy.sleep(wait)


def _check_limit(url: str, num_bytes: int, policy: DownloadPolicy) -> None:
    if policy.limit_bytes is not None and num_bytes > policy.limit_bytes:
        raise TooLargeError(
            "{url} is large: {num_bytes:,} bytes or more",
            url=url,
            num_bytes=num_bytes,
            hint="add --yes to fetch it without asking",
        )


def _pour(wanted: DownloadRequest, stream: Stream, part: Part, *, name: str, policy: DownloadPolicy) -> None:
    total = wanted.num_bytes if stream.total_bytes is None else stream.total_bytes
    stage = Message("fetching {name}", name=name)
    done = stream.start
    with storage_errors(part.path), part.open(stream, name=name) as file:
        for chunk in stream.chunks:
            file.write(chunk)
            done += len(chunk)
            _check_limit(wanted.url, done, policy)
            policy.progress(stage, done, total or 0)
        os.fsync(file.fileno())
    if total is not None and done < total:
        raise PassingError("the connection ended after {done:,} of {total:,} bytes", done=done, total=total)
    with open(part.path, "rb") as start:
        head = start.read(1024)
    is_page = stream.media_type in ("text/html", "application/xhtml+xml") or _PAGE.match(head)
    if is_page and Path(name).suffix.lower() not in _PAGES:  # an error or a login, with status 200
        raise DataError(
            "{url} sends a web page instead of {name}",
            url=wanted.url,
            name=name,
            hint="open the address in a browser: it may ask to log in, or the file may have moved",
        )


def _check_whole(wanted: DownloadRequest, part: Part, before: DownloadRecord | None, *, name: str, sha256: str) -> None:
    if part.num_bytes == 0:
        raise DataError("{url} is empty", url=wanted.url, hint="check the address in a browser")
    if wanted.num_bytes not in (None, part.num_bytes):
        raise DataError(
            "{url} has {total:,} bytes, not the expected {expected:,}",
            url=wanted.url,
            total=part.num_bytes,
            expected=wanted.num_bytes,
            hint="the file was replaced by its owner, or this is a different file; check the address",
        )
    if wanted.sha256 and sha256 != wanted.sha256:
        raise DataError(
            "{url}: {name} has SHA-256 {found}, not {expected}",
            url=wanted.url,
            name=name,
            found=sha256,
            expected=wanted.sha256,
            hint="the download was discarded; try again, and if the same happens, this is not the file you want",
        )
    if not wanted.sha256 and before is not None and sha256 != before.sha256:
        raise DataError(
            "{url} no longer gives the same bytes as on {date}: SHA-256 {found}, not {expected}",
            url=wanted.url,
            date=before.date,
            found=sha256,
            expected=before.sha256,
            hint="if that is expected, accept it with --sha256 {found}",
        )


def _settle(
    wanted: DownloadRequest, part: Part, records: Records, *, folder: Path, name: str, sha256: str
) -> DownloadRecord:
    """Record it, then give the file its name, or those of what it holds."""
    record = DownloadRecord(
        url=wanted.url,
        name=name,
        licence=one_line(wanted.licence),
        num_bytes=part.num_bytes,
        sha256=sha256,
        vouched_by=wanted.vouched_by if wanted.sha256 else "first use",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        revision=wanted.revision,
    )
    renamed = {part.path: folder / name}
    unpacked = part.path.with_suffix(".unpacked")
    try:
        if wanted.inside:
            with storage_errors(unpacked):
                shutil.rmtree(unpacked, ignore_errors=True)
                unpacked.mkdir()
                names = unpack(part.path, unpacked, inside=wanted.inside)
            for each in names:
                records.claim(each, url=wanted.url)
            renamed = {unpacked / each: folder / each for each in names}
            record = replace(record, unpacked={each: file_sha256(unpacked / each) for each in names})
        records.put(record)
        with storage_errors(folder):
            for temporary, final in renamed.items():
                os.replace(temporary, final)
            fsync_folder(folder)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return record


def unpack(archive: Path, folder: Path, *, inside: str) -> list[str]:
    """Names of the files written to `folder`: those of the folder `inside`, below the one that the archives of
    repositories begin with. Raises DataError.
    """
    hint = "the download is not the expected archive; try again"
    found: dict[str, zipfile.ZipInfo] = {}
    try:
        with zipfile.ZipFile(archive) as opened:
            for member in opened.infolist():
                parts = PurePosixPath(member.filename).parts
                kind = member.external_attr >> 28  # of a Unix mode: 8 is a regular file, 0 unknown
                if len(parts) == 3 and parts[1] == inside and not member.is_dir() and kind in (0, 8):
                    found[safe_name(member.filename)] = member
            if not found or sum(member.file_size for member in found.values()) > MAX_UNPACKED_BYTES:
                raise DataError(
                    "the archive has {files:,} files in {folder}/ that can be unpacked",
                    files=len(found),
                    folder=inside,
                    hint=hint,
                )
            for name, member in found.items():
                with opened.open(member) as source, open(folder / name, "xb") as file:
                    shutil.copyfileobj(source, file)
                    file.flush()
                    os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError("the archive cannot be unpacked: {error}", error=error, hint=hint) from error
    return list(found)
