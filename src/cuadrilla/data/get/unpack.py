"""The texts of one folder of a zip archive, as files beside each other.

Only regular members below that folder are taken; a name never leaves the destination, two members never share one, and
neither the number of files nor their size is unbounded: what a member unpacks to is counted, not believed.
"""

import os
import shutil
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from cuadrilla.data.get.origin import safe_name
from cuadrilla.errors import DataError
from cuadrilla.rundir import storage_errors

MAX_FILES = 100_000
MAX_UNPACKED_BYTES = 20 * 10**9
_READ_BYTES = 2**20


def unpack(archive: Path, folder: Path, *, inside: str) -> list[str]:
    """Names of the files written to `folder`, which is made, or emptied.

    `inside` is a folder of the archive, below the one that the archives of repositories begin with. Raises DataError,
    ResourceError.
    """
    hint = "the download is not the expected archive; try again"
    with storage_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    names: list[str] = []
    left_bytes = MAX_UNPACKED_BYTES
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.infolist() if _is_inside(member, inside)]
            if not members or len(members) > MAX_FILES:
                raise DataError(
                    "the archive has {files:,} files in {folder}/", files=len(members), folder=inside, hint=hint
                )
            for member in members:
                name = safe_name(member.filename)
                if name.lower() in {each.lower() for each in names}:
                    raise DataError(
                        "the archive has two files {name} in {folder}/", name=name, folder=inside, hint=hint
                    )
                left_bytes -= _write(opened, member, folder / name, most=left_bytes)
                names.append(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError("the archive cannot be unpacked: {error}", error=error, hint=hint) from error
    return names


def _is_inside(member: zipfile.ZipInfo, inside: str) -> bool:
    parts = PurePosixPath(member.filename.replace("\\", "/")).parts
    kind = member.external_attr >> 28  # of a Unix mode: 8 is a regular file, 0 unknown
    return len(parts) == 3 and parts[1] == inside and not member.is_dir() and kind in (0, 8)


def _write(opened: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, *, most: int) -> int:
    """Bytes written."""
    num_bytes = 0
    with opened.open(member) as source, storage_errors(path), open(path, "xb") as file:
        while chunk := source.read(_READ_BYTES):
            num_bytes += len(chunk)
            if num_bytes > most:
                raise DataError(
                    "the archive unpacks to more than {most:,} bytes",
                    most=MAX_UNPACKED_BYTES,
                    hint="unpack it yourself and prepare the folder",
                )
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return num_bytes
