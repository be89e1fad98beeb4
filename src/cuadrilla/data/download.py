"""Fetch a corpus of the catalogue by HTTPS into a folder of its own, in one go, and record it in `SOURCE.json`.

Certificates are verified with the system's trust store (which may hold a company's own authority; `SSL_CERT_FILE` adds
one), and the system's proxies are used.

Invariants
* A file under its own name is complete: the length of a download and the checksums of an archive have been checked.
  Until then it is in a hidden folder, which `data prepare` does not see, and which the next download deletes.
* At the end the files are made durable, then the record, then the files are renamed. If a crash comes between two of
  these, the next run fetches again.
* A lock keeps other processes out of the folder.
"""

import os
import re
import shutil
import ssl
import zipfile
import zlib
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

import httpx2 as httpx

from cuadrilla.data.catalogue import CatalogueEntry
from cuadrilla.data.record import RECORD, DownloadRecord, read_record
from cuadrilla.data.sources import Progress
from cuadrilla.errors import DataError, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, file_sha256, fsync_folder, storage_errors, write_json
from cuadrilla.version import __version__

SILENCE_SECONDS = 30.0


def fetch(corpus: CatalogueEntry, folder: Path, *, progress: Progress) -> bool:
    """Fetch a corpus into its folder. False if it is there already.

    Raises LinkError if the server does not send it, DataError if it sends something else or other files are in the
    folder, ResourceError for the disk, ConfigError if another process fetches into the folder.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder / ".lock"):
        record = read_record(folder)
        if record and all((folder / name).is_file() for name in record.files):
            return False
        if not record and (others := sorted(path.name for path in folder.glob("[!.]*"))):
            raise DataError(
                "{folder} holds {name}, which did not come from {url}",
                folder=folder,
                name=others[0],
                url=corpus.url,
                hint="move it away, or choose another folder with --to",
            )
        work = folder / ".get"
        shutil.rmtree(work, ignore_errors=True)  # from a download that was killed
        try:
            with storage_errors(work):
                work.mkdir()
            file = work / corpus.file
            _receive(corpus.url, file, progress=progress)
            _publish(_unpacked(file, inside=corpus.inside) if corpus.inside else [file], folder, corpus)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return True


def _receive(url: str, path: Path, *, progress: Progress) -> None:
    """Fetch the whole file. Raises LinkError, DataError, ResourceError."""
    stage = Message("fetching {name}", name=path.name)
    headers = {"User-Agent": f"cuadrilla/{__version__}", "Accept-Encoding": "identity"}
    try:
        with (
            httpx.Client(verify=ssl.create_default_context(), timeout=SILENCE_SECONDS) as client,
            client.stream("GET", url, headers=headers, follow_redirects=True) as response,
        ):
            if response.status_code != 200:
                raise httpx.ReadError(f"{response.status_code} {response.reason_phrase}".strip())
            if response.headers.get("Content-Type", "").startswith("text/html"):
                hint = "open the address in a browser: the network may ask to log in, or the file may have moved"
                raise DataError("{url} sends a web page instead of a file", url=response.url, hint=hint)
            done, total = 0, int(response.headers.get("Content-Length", 0))
            with storage_errors(path), open(path, "wb") as file:
                for chunk in response.iter_raw():
                    file.write(chunk)
                    done += len(chunk)
                    progress(stage, done, total)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise LinkError(
            "{url}: {reason}",
            url=url,
            reason=str(error) or type(error).__name__,
            hint="check this machine's network (behind a company proxy, set SSL_CERT_FILE), and type the same command "
            "again",
        ) from error


def _unpacked(archive: Path, *, inside: str) -> list[Path]:
    """Unpack the files of the folder `inside`, which is one level below the top folder of a repository's archive.

    Raises DataError, ResourceError.
    """
    found: list[Path] = []
    try:
        with storage_errors(archive), zipfile.ZipFile(archive) as opened:
            for member in opened.infolist():
                parts = PurePosixPath(member.filename).parts
                if len(parts) != 3 or parts[1] != inside or member.is_dir():
                    continue
                name = re.sub(r"[^\w.-]", "_", parts[2])  # a plain name, whatever the archive holds
                if name.startswith(".") or name in (RECORD, archive.name):
                    continue
                found.append(archive.with_name(name))
                with opened.open(member) as source, open(found[-1], "xb") as file:
                    shutil.copyfileobj(source, file)
            if not found:
                raise zipfile.BadZipFile(f"no folder {inside} with files")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        hint = "the download is not the expected archive; try again"
        raise DataError("the archive cannot be unpacked: {error}", error=error, hint=hint) from error
    return found


def _publish(files: list[Path], folder: Path, corpus: CatalogueEntry) -> None:
    """Write the record, and move the files to their names. Raises ResourceError."""
    with storage_errors(folder):
        for path in files:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        record = DownloadRecord(
            url=corpus.url,
            licence=corpus.licence,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            files={path.name: file_sha256(path) for path in files},
        )
        write_json(folder / RECORD, asdict(record))
        for path in files:
            os.replace(path, folder / path.name)
        fsync_folder(folder)
