"""Fetch one file by HTTP or HTTPS into a folder, in as many tries as it takes; check its hash and record it.

A try resumes a partial file only if a validator (a strong ETag, else Last-Modified; RFC 9110, 13 and 14) says that the
server's file is still the same. Certificates are verified with the system's trust store (which may hold a company's own
authority; `SSL_CERT_FILE` adds one), and the system's proxies are used.

Invariants
* A file under its own name is complete, and was checked against every hash that is known. Until then it is a hidden
  part, which `data prepare` does not see.
* However a download ends, what has arrived is kept, if the server allows resuming and the bytes did not prove wrong.
* At the end the part is made durable, then the record, then the part is renamed. If a crash comes between two of these,
  the next run repairs it.
* A lock keeps other processes out of the folder.
"""

import hashlib
import os
import re
import shutil
import ssl
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.message import Message as Header
from pathlib import Path, PurePosixPath
from time import sleep
from urllib.parse import unquote, urlsplit

import httpx2 as httpx

from cuadrilla.data.record import RECORD, UNKNOWN, DownloadRecord, read_records
from cuadrilla.data.sources import Progress
from cuadrilla.errors import DataError, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, file_sha256, fsync_folder, storage_errors, write_json
from cuadrilla.version import __version__

MAX_TRIES = 6
"""Number of tries in a row without a new byte after which the download fails."""
SILENCE_SECONDS = 30.0
MAX_NAME = 150
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_NOT_IN_NAMES = re.compile(r"[^\w .,;()+=&'!@#$%~\[\]{}-]")

Report = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class DownloadRequest:
    """A file to fetch, and what is known about it beforehand."""

    url: str
    """The address. The record has it, and it identifies the download."""
    name: str = ""
    """Name of the file. By default the server's name for it, or the end of the address."""
    subfolder: str = ""
    licence: str = UNKNOWN
    sha256: str = ""
    inside: str = ""
    """Folder in a zip archive whose files are unpacked. Empty: the downloaded file is kept as it is."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    records: Sequence[DownloadRecord]
    folder: Path
    already: bool
    """The file was there before."""


class Part:
    """The beginning of a file that is being fetched. It is hidden, so that `data prepare` does not see it."""

    def __init__(self, folder: Path, *, url: str) -> None:
        key = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:16]
        self.path, self._tag = folder / f".{key}.part", folder / f".{key}.tag"
        self.validator = self._tag.read_text() if self._tag.exists() else ""

    @property
    def num_bytes(self) -> int:
        """Bytes that a try can resume from; 0 without a validator."""
        return self.path.stat().st_size if self.validator and self.path.exists() else 0

    def begin(self, validator: str) -> None:
        """Delete what is there, and begin a file with this validator."""
        self.path.unlink(missing_ok=True)
        self.validator = validator
        self._tag.write_text(validator)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._tag.unlink(missing_ok=True)


def fetch(wanted: DownloadRequest, *, to: Path, progress: Progress, report: Report = lambda _text: None) -> Fetched:
    """Fetch one file into `to`, unless it is there already.

    Raises LinkError if the server does not send it, DataError if it sends something else, ResourceError for the disk,
    ConfigError if another process fetches into `to`.
    """
    folder = to / wanted.subfolder
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder / ".lock", purpose="`cuadrilla data get`"):
        records = read_records(folder)
        here = [row for row in records if row.url == wanted.url]
        is_whole = all((folder / row.name).is_file() for row in here)
        if here and is_whole and wanted.sha256 in ("", *(row.sha256 for row in here)):
            return Fetched(records=here, folder=folder, already=True)
        part = Part(folder, url=wanted.url)
        try:
            name = _receive(wanted.url, part, progress=progress, report=report)
            rows = _settle(wanted, part.path, records, folder=folder, name=safe_name(wanted.name or name))
        except BaseException as failure:
            if isinstance(failure, DataError) or not part.validator:  # the file is wrong, or cannot be resumed
                part.discard()
            raise
        part.discard()
    return Fetched(records=rows, folder=folder, already=False)


def _receive(url: str, part: Part, *, progress: Progress, report: Report) -> str:
    """Fetch the whole file into `part`. Returns its name on the server. Raises LinkError, DataError, ResourceError."""
    tries = 0
    while True:
        before = part.num_bytes
        try:
            return _try(url, part, progress=progress)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            tries = 1 if part.num_bytes > before else tries + 1
            is_new = isinstance(error, httpx.ConnectError) and not before
            may_pass = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
            if is_new or not may_pass or tries == MAX_TRIES:
                raise LinkError(
                    "{url}: {reason}",
                    url=url,
                    reason=reason,
                    hint="check the address and this machine's network (behind a company proxy, set SSL_CERT_FILE), "
                    "and run the same command again: what has arrived is kept if the server can resume",
                ) from error
        report(Message("{reason}; trying again in {wait:.0f} s", reason=reason, wait=2.0**tries))
        sleep(2.0**tries)


def _try(url: str, part: Part, *, progress: Progress) -> str:
    start = part.num_bytes
    headers = {"User-Agent": f"cuadrilla/{__version__}", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-", "If-Range": part.validator} if start else {}
    with (
        httpx.Client(verify=ssl.create_default_context(), timeout=SILENCE_SECONDS) as client,
        client.stream("GET", url, headers=headers, follow_redirects=True) as response,
    ):
        _pour(response, part, start=start, progress=progress)
        return _name(response)


def _pour(response: httpx.Response, part: Part, *, start: int, progress: Progress) -> None:
    """Append a response's bytes to the part. Raises TransportError if they do not continue it."""
    validator = _validator(response.headers)
    if response.status_code in (206, 416) and start:
        sent, is_same = response.headers.get("Content-Range", ""), validator in ("", part.validator)
        if is_same and sent == f"bytes */{start}":
            return  # it was complete
        if not is_same or not sent.startswith(f"bytes {start}-"):
            part.discard()
            raise httpx.ReadError("the file has changed")
    elif response.status_code == 200:
        if response.headers.get("Content-Type", "").startswith("text/html") and not _name(response).endswith("html"):
            raise DataError(
                "{url} sends a web page instead of a file",
                url=response.url,
                hint="open the address in a browser: it may ask to log in, or the file may have moved",
            )
        start = 0
    else:
        raise _refusal(response)
    stage = Message("fetching {name}", name=_name(response))
    total = start + int(response.headers.get("Content-Length", 0) or -start)
    with storage_errors(part.path):
        if start == 0:
            part.begin(validator)
        with open(part.path, "ab", buffering=0) as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                start += len(chunk)
                progress(stage, start, total)
            os.fsync(file.fileno())


def _refusal(response: httpx.Response) -> Exception:
    status = f"{response.status_code} {response.reason_phrase}".strip()
    if response.status_code in _PASSING_STATUS:
        return httpx.ReadError(f"{response.url.host} answers {status}")
    hint = "check the address (`cuadrilla data get --list` shows known corpora); it may need an account"
    return LinkError("{url}: {status}", url=response.url, status=status, hint=hint)


def _validator(headers: httpx.Headers) -> str:
    """A strong ETag, or else Last-Modified. Empty for a weak ETag, which does not promise equal bytes."""
    tag = str(headers.get("ETag") or headers.get("Last-Modified", ""))
    return "" if tag.startswith("W/") else tag


def _name(response: httpx.Response) -> str:
    """The server's name for the file (RFC 6266), or the end of the requested address. It is not checked."""
    header = Header()
    header["Content-Disposition"] = response.headers.get("Content-Disposition", "")
    asked = response.history[0].url if response.history else response.url
    return header.get_filename("") or unquote(urlsplit(str(asked)).path.rstrip("/").rpartition("/")[2])


def _settle(
    wanted: DownloadRequest, part: Path, records: list[DownloadRecord], *, folder: Path, name: str
) -> Sequence[DownloadRecord]:
    """Check the file's hash, write the record, then move the file, or the files unpacked from it, to their names."""
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
        for path in (folder / each for each in files.keys() - own):
            if path.exists():
                hint = "move it away, or choose another folder with --to"
                raise DataError(
                    "{path} is already there, and did not come from {url}", path=path, url=wanted.url, hint=hint
                )
        rows = [
            DownloadRecord(
                url=wanted.url,
                name=each,
                licence=wanted.licence,
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
    """Unpack the files of the folder `inside`, which is one level below the top folder of a repository's archive.

    Returns the unpacked files by name. Raises DataError, ResourceError.
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
                name = safe_name(parts[2])
                if name in found:
                    raise zipfile.BadZipFile(f"two of its files are called {name}")
                found[name] = path = folder / name
                with opened.open(member) as source, open(path, "wb") as file:
                    shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        hint = "the download is not the expected archive; try again"
        raise DataError("the archive cannot be unpacked: {error}", error=error, hint=hint) from error
    return found


def safe_name(text: str) -> str:
    """A plain, visible file name that is valid on every system and names no folder, whatever `text` is."""
    name = unicodedata.normalize("NFC", text).replace("\\", "/").rpartition("/")[2]
    stem, suffix = os.path.splitext(_NOT_IN_NAMES.sub("_", name).strip(" .") or "download")
    name = stem[:MAX_NAME].rstrip(" .") + suffix[:20]
    return f"_{name}" if name.lower() == RECORD.lower() else name
