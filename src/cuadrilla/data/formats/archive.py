"""Members of zip and tar archives, read one after another as streams; nothing is ever extracted.

A member's name is a label and never a path that is opened. Links and devices are passed on as such, for the caller to
count.
"""

import hashlib
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Self

from cuadrilla.data.formats.packing import CHUNK_BYTES, Digest, Limit, opened
from cuadrilla.printable import one_line

TARS = {
    **{".tar": "", ".tgz": ".gz", ".tzst": ".zst", ".txz": ".xz", ".tbz2": ".bz2"},
    **{f".tar{packing}": packing for packing in (".gz", ".zst", ".xz", ".bz2")},
}
ZIP = ".zip"
ARCHIVES = (ZIP, *TARS)


class ArchiveEntry(NamedTuple):
    """One member. `stream` is read before the next entry is asked for, or not at all."""

    name: str
    stream: IO[bytes] | None
    """None for a link or a device."""


def members(path: Path, kind: str, digest: Digest) -> Iterator[ArchiveEntry]:
    """Every member but folders, in the archive's order. `kind` is one of `ARCHIVES`.

    `digest` learns the bytes of the archive by the time the last member was given. Raises DataError beyond the limit,
    and what the libraries raise for damage.
    """
    return _zip_members(path, digest) if kind == ZIP else _tar_members(path, TARS[kind], digest)


def _zip_members(path: Path, digest: Digest) -> Iterator[ArchiveEntry]:
    with open(path, "rb") as file:
        hashlib.file_digest(file, lambda: digest)  # type: ignore[arg-type, return-value]
        limit = Limit(path)
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
                    yield ArchiveEntry(one_line(info.filename), None)
                    continue
                with archive.open(info) as member:
                    yield ArchiveEntry(one_line(info.filename), limit.watching(member))


class _StrictHeader(tarfile.TarInfo):
    """`TarFile` ends in silence at a damaged header."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Raises ReadError for damage."""
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from error


def _tar_members(path: Path, packing: str, digest: Digest) -> Iterator[ArchiveEntry]:
    limit = Limit(path)
    with (
        opened(path, packing, digest) as file,
        tarfile.open(fileobj=file, mode="r|", tarinfo=_StrictHeader, errors="replace", bufsize=CHUNK_BYTES) as archive,
    ):
        while info := archive.next():
            archive.members.clear()  # type: ignore[attr-defined]
            if info.isdir():
                continue
            member = archive.extractfile(info) if info.isreg() else None
            yield ArchiveEntry(one_line(info.name), limit.watching(member) if member else None)
        while file.read(CHUNK_BYTES):  # a packed one may be damaged behind its members
            pass
