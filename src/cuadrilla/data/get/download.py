"""One file from an origin into a folder: resumed, retried, measured, hashed, recorded.

Invariants
* A file with its name in the folder is complete, and was checked against every length and hash that is known. Until
  then it is a hidden part (`part.py`), which `data prepare` does not see.
* What came is kept, whatever ends the download, if the server allows to go on from there and it did not prove wrong.
* The order at the end is: part durable, record durable, rename. A crash between any two is cured by the next run.
* One process per folder, by a lock.
"""

import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cuadrilla.data.get.origin import Origin, PassingError, Stream, TooLargeError, name_in, safe_name
from cuadrilla.data.get.part import Part
from cuadrilla.data.get.record import DownloadRecord, Records, hash_file, one_line
from cuadrilla.data.get.unpack import unpack
from cuadrilla.errors import DataError, LinkError, ResourceError
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, fsync_folder, storage_errors

LARGE_BYTES = 100 * 10**6
ENOUGH_BYTES = 2**16
"""A try that brought so much is progress: the count of tries begins anew."""
_SIGNATURES = {
    ".parquet": b"PAR1",
    ".gz": b"\x1f\x8b",
    ".tgz": b"\x1f\x8b",
    ".zip": b"PK",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ",
    ".zst": b"\x28\xb5\x2f\xfd",
}
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!doctype html|<html[\s>])", re.IGNORECASE)
_PAGES = (".html", ".htm", ".xhtml")

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all or 0)."""


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
    """The folder in an archive of which the files are wanted; empty to keep the file as it is."""


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
            part.save()
            _check_start(part.head(), "", url=wanted.url, name=name)  # the first chunk may have been a single byte
            _check_whole(wanted, part, records.of(wanted.url), name=name)
        except BaseException as failure:
            keep = bool(part.validator) and not isinstance(failure, DataError)
            try:
                part.close(save=keep)
            finally:
                if not keep:
                    part.discard()
            raise
        part.close(save=False)
        record = _settle(wanted, part, records, folder=folder, name=name)
    return Fetched(record=record, folder=folder, already=False)


def _receive(wanted: DownloadRequest, part: Part, records: Records, *, policy: DownloadPolicy) -> str:
    """All bytes into the part, over as many tries as it takes; the file's name."""
    furthest, tries = part.num_bytes, 0
    while True:
        try:
            stream = wanted.origin.open(part.num_bytes, part.validator)
            try:
                name = _name(wanted, stream, part)
                records.claim(name, url=wanted.url)
                _admit(wanted, stream, part, policy=policy)
                part.begin(stream, name=name)
                _pour(wanted, stream, part, policy=policy)
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


def _name(wanted: DownloadRequest, stream: Stream, part: Part) -> str:
    resumed = part.name if stream.start else ""
    return wanted.name or resumed or safe_name(stream.name or name_in(wanted.url))


def _admit(wanted: DownloadRequest, stream: Stream, part: Part, *, policy: DownloadPolicy) -> None:
    """Refuse by what is announced, before a byte is written."""
    total = stream.total_bytes
    if total is None:
        return
    if wanted.num_bytes not in (None, total):
        raise DataError(
            "{url} has {total:,} bytes, not the expected {expected:,}",
            url=wanted.url,
            total=total,
            expected=wanted.num_bytes,
            hint="the file was replaced by its owner, or this is a different file; check the address",
        )
    _check_limit(wanted.url, total, policy)
    folder = part.path.parent
    with storage_errors(folder):
        free_bytes = shutil.disk_usage(folder).free
    if total - part.num_bytes > free_bytes:
        raise ResourceError(
            "{url} needs {needed:,} more bytes; {folder} has {free:,} left",
            url=wanted.url,
            needed=total - part.num_bytes,
            folder=folder,
            free=free_bytes,
            hint="free some space or choose another folder with --to",
        )


def _check_limit(url: str, num_bytes: int, policy: DownloadPolicy) -> None:
    if policy.limit_bytes is not None and num_bytes > policy.limit_bytes:
        raise TooLargeError(
            "{url} is large: {num_bytes:,} bytes or more",
            url=url,
            num_bytes=num_bytes,
            hint="add --yes to fetch it without asking",
        )


def _pour(wanted: DownloadRequest, stream: Stream, part: Part, *, policy: DownloadPolicy) -> None:
    expected = wanted.num_bytes if stream.total_bytes is None else stream.total_bytes
    stage = Message("fetching {name}", name=part.name)
    policy.progress(stage, part.num_bytes, expected or 0)
    for chunk in stream.chunks:
        if not chunk:
            continue
        if part.num_bytes == 0:
            _check_start(chunk, stream.media_type, url=wanted.url, name=part.name)
        if expected is not None and part.num_bytes + len(chunk) > expected:
            raise DataError(
                "{url} sends more than the {expected:,} bytes it should have",
                url=wanted.url,
                expected=expected,
                hint="try again, or take the file from another address",
            )
        if expected is None:
            _check_limit(wanted.url, part.num_bytes + len(chunk), policy)
        part.write(chunk)
        policy.progress(stage, part.num_bytes, expected or 0)
    if expected is not None and part.num_bytes < expected:
        raise PassingError(
            "the connection ended after {num_bytes:,} of {expected:,} bytes",
            num_bytes=part.num_bytes,
            expected=expected,
        )


def _check_start(chunk: bytes, media_type: str, *, url: str, name: str) -> None:
    """Servers answer with a web page (an error, a login) and status 200."""
    suffix = Path(name).suffix.lower()
    if suffix not in _PAGES and (media_type in ("text/html", "application/xhtml+xml") or _PAGE.match(chunk)):
        raise DataError(
            "{url} sends a web page instead of {name}",
            url=url,
            name=name,
            hint="open the address in a browser: it may ask to log in, or the file may have moved",
        )
    signature = _SIGNATURES.get(suffix, b"")
    if chunk[: len(signature)] != signature[: len(chunk)]:
        raise DataError(
            "{url}: what it sends is not {suffix}", url=url, suffix=suffix, hint="check the address in a browser"
        )


def _check_whole(wanted: DownloadRequest, part: Part, before: DownloadRecord | None, *, name: str) -> None:
    if part.num_bytes == 0:
        raise DataError("{url} is empty", url=wanted.url, hint="check the address in a browser")
    if wanted.sha256 and part.sha256 != wanted.sha256:
        raise DataError(
            "{url}: {name} has SHA-256 {found}, not {expected}",
            url=wanted.url,
            name=name,
            found=part.sha256,
            expected=wanted.sha256,
            hint="the download was discarded; try again, and if the same happens, this is not the file you want",
        )
    if not wanted.sha256 and before is not None and part.sha256 != before.sha256:
        raise DataError(
            "{url} no longer gives the same bytes as on {date}: SHA-256 {found}, not {expected}",
            url=wanted.url,
            date=before.date,
            found=part.sha256,
            expected=before.sha256,
            hint="if that is expected, accept it with --sha256 {found}",
        )


def _settle(wanted: DownloadRequest, part: Part, records: Records, *, folder: Path, name: str) -> DownloadRecord:
    """DownloadRecord, then give the file its name or unpack it."""
    record = DownloadRecord(
        url=wanted.url,
        name=name,
        licence=one_line(wanted.licence),
        num_bytes=part.num_bytes,
        sha256=part.sha256,
        vouched_by=wanted.vouched_by if wanted.sha256 else "first use",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        revision=wanted.revision,
    )
    if not wanted.inside:
        records.put(record)
        _rename(part.path, folder / name)
    else:
        unpacked = part.path.with_suffix(".unpacked")
        try:
            names = unpack(part.path, unpacked, inside=wanted.inside)
            for each in names:
                records.claim(each, url=wanted.url)
            record = replace(record, unpacked={each: hash_file(unpacked / each) for each in names})
            records.put(record)
            for each in names:
                _rename(unpacked / each, folder / each)
        except DataError:
            part.discard()
            raise
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)
    with storage_errors(folder):
        fsync_folder(folder)
    part.discard()
    return record


def _rename(temporary: Path, final: Path) -> None:
    with storage_errors(final):
        os.replace(temporary, final)
