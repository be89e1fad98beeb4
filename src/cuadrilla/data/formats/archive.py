"""Members of zip and tar archives, read one after another as streams; nothing is ever extracted.

A member's name is a label and never a path that is opened. Still, an archive that holds absolute names or `..`, or is
encrypted, was not made by somebody who packed texts, and is refused whole. Links and devices are passed on as such, for
the caller to count.
"""

import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from io import BufferedReader, FileIO
from pathlib import Path

from cuadrilla.data.formats.packing import CHUNK_BYTES, Budget, Digest, chunks, reason_of, unpacked
from cuadrilla.data.formats.tar import ArchiveEntry, damaged, entries
from cuadrilla.errors import DataError
from cuadrilla.messages import Message

MAX_MEMBERS = 100_000
MAX_NAME = 1_000
TARS = {
    **{".tar": "", ".tgz": ".gz", ".tzst": ".zst", ".txz": ".xz", ".tbz2": ".bz2"},
    **{f".tar{packing}": packing for packing in (".gz", ".zst", ".xz", ".bz2")},
}
ZIP = ".zip"
ARCHIVES = (ZIP, *TARS)

_MAX_DIRECTORY_BYTES = 2**24
_ENCRYPTED = 0x1
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what zipfile unpacks in bounded steps
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
    *(ValueError, NotImplementedError, RuntimeError, OverflowError, IndexError),
)
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def members(path: Path, kind: str, *, digest: Digest | None = None) -> Iterator[ArchiveEntry]:
    """Every member but folders, in the archive's order, with a checked name. `kind` is one of `ARCHIVES`.

    `digest` learns the bytes of the archive by the time the last member was given. Raises DataError for damage, bombs
    and whatever else is refused.
    """
    found = _zip_entries(path, digest) if kind == ZIP else entries(_tar_bytes(path, kind, digest), where=str(path))
    with closing(found):
        for number, entry in enumerate(found):
            if number >= MAX_MEMBERS:
                raise DataError(
                    "{path} has more than {most:,} members",
                    path=path,
                    most=MAX_MEMBERS,
                    hint="join the texts, for example as .jsonl.gz",
                )
            yield entry._replace(name=_checked_name(entry.name, path))


def _tar_bytes(path: Path, kind: str, digest: Digest | None) -> Iterator[bytes]:
    return unpacked(path, TARS[kind], digest=digest)


def _checked_name(name: str, path: Path) -> str:
    clean = _CONTROLS.sub("\ufffd", name)
    parts = re.split(r"[/\\]", clean)
    if parts[0] == "" or re.match("[A-Za-z]:", parts[0]) or ".." in parts:
        raise DataError(
            "{path} holds a member named {name!r}, which would be outside of any folder",
            path=path,
            name=clean[:200],
            hint="an archive made for texts has no such names: leave it out, or make it again",
        )
    if len(clean) > MAX_NAME:
        raise damaged(str(path), Message("a name of {characters:,} characters", characters=len(clean)))
    return "/".join(part for part in parts if part not in ("", "."))


class _CappedFile(BufferedReader):
    """zipfile reads the directory of an archive at once, however long the archive says it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(Message("a directory of members of {size} bytes", size=size))
        return super().read(size)


def _zip_entries(path: Path, digest: Digest | None) -> Generator[ArchiveEntry, None, None]:
    for _ in chunks(path, digest):
        pass
    try:
        with _CappedFile(FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            budget = Budget(where=str(path), packed_bytes=path.stat().st_size)
            for info in archive.infolist():
                if info.is_dir():
                    continue
                if info.flag_bits & _ENCRYPTED:
                    raise DataError(
                        "{path}!{name} is encrypted",
                        path=path,
                        name=info.filename,
                        hint="unpack it with its password first",
                    )
                if info.compress_type not in _ZIP_METHODS:
                    raise DataError(
                        "{path}!{name} is packed with zip method {method}",
                        path=path,
                        name=info.filename,
                        method=info.compress_type,
                        hint="make the archive again with deflate, the usual method",
                    )
                mode = stat.S_IFMT(info.external_attr >> 16)
                yield ArchiveEntry(info.filename, mode in (0, stat.S_IFREG), _zip_chunks(archive, info, budget))
    except _ZIP_ERRORS as error:
        raise damaged(str(path), reason_of(error)) from error


def _zip_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: Budget) -> Iterator[bytes]:
    try:
        with closing(archive.open(info)) as member:
            while chunk := member.read(CHUNK_BYTES):
                budget.spend(len(chunk))
                yield chunk
    except _ZIP_ERRORS as error:
        raise damaged(f"{budget.where}!{info.filename}", reason_of(error)) from error
