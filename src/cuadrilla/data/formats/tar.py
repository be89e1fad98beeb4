"""Members of a tar, read from front to back; nothing is written anywhere.

The header blocks are decoded by the standard library, but not its `TarFile`: that one ends in silence at a damaged
header, keeps a record of every member, and reads an extended header of any size at once.
"""

import itertools
import tarfile
from collections.abc import Generator, Iterator
from typing import NamedTuple

from cuadrilla.errors import DataError
from cuadrilla.messages import Message

_BLOCK = 512
_MAX_EXTENDED_BYTES = 2**20
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)


class ArchiveEntry(NamedTuple):
    """One member. `chunks` is read before the next entry is asked for, or not at all."""

    name: str
    is_regular: bool
    """Not a link or a device."""
    chunks: Iterator[bytes]


class _Cursor:
    """Exact numbers of bytes from pieces of any size."""

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._chunks = chunks
        self._chunk = b""
        self._position = 0
        self._where = where

    def pieces(self, num_bytes: int) -> Iterator[bytes]:
        """The next `num_bytes`, as they come. Raises DataError if there are fewer."""
        while num_bytes:
            if self._position == len(self._chunk):
                self._chunk, self._position = next(self._chunks, b""), 0
            piece = self._chunk[self._position : self._position + num_bytes]
            if not piece:
                raise damaged(self._where, Message("it ends in the middle"))
            self._position += len(piece)
            num_bytes -= len(piece)
            yield piece

    def take(self, num_bytes: int) -> bytes:
        return b"".join(self.pieces(num_bytes))

    def finish(self) -> None:
        """To the end: a packed file has its checksum there, and another archive would be lost in silence."""
        for piece in itertools.chain((self._chunk[self._position :],), self._chunks):
            if piece.count(0) != len(piece):
                raise damaged(self._where, Message("there is data after its end"))


def damaged(where: str, why: str) -> DataError:
    """The error for an archive that is not what it should be."""
    return DataError(
        "{where} is a damaged archive: {why}", where=where, why=why, hint="fetch or make it again, or leave it out"
    )


def entries(chunks: Iterator[bytes], *, where: str) -> Generator[ArchiveEntry, None, None]:
    """Every member but folders. Raises DataError for damage, and for sparse members."""
    cursor = _Cursor(chunks, where)
    extended: dict[str, str] = {}
    while any(block := cursor.take(_BLOCK)):
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        except tarfile.HeaderError as error:
            raise damaged(where, str(error)) from error
        if info.size < 0:
            raise damaged(where, Message("a member has a negative size"))
        padding = -info.size % _BLOCK
        if info.type in (*_PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if info.size > _MAX_EXTENDED_BYTES:
                raise damaged(where, Message("a name or header of {size:,} bytes", size=info.size))
            payload = cursor.take(info.size + padding)[: info.size]
            extended |= _extended(info.type, payload, where)
            continue
        name = extended.get("path", info.name)
        if info.type == tarfile.GNUTYPE_SPARSE or "GNU.sparse" in extended:
            raise DataError(
                "{where}!{name} is a sparse member",
                where=where,
                name=name,
                hint="make the archive again without --sparse",
            )
        size = _decimal(extended["size"], where) if "size" in extended else info.size
        extended = {}
        has_data = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
        body = cursor.pieces(size) if has_data else iter(())
        if not info.isdir():
            yield ArchiveEntry(name, info.isreg(), body)
        for _ in body:
            pass
        if has_data:
            cursor.take(-size % _BLOCK)
    cursor.finish()


def _extended(kind: bytes, payload: bytes, where: str) -> dict[str, str]:
    """What a header says about the member behind it: `path`, `size`, and whether it is sparse."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": payload.rstrip(b"\0").decode(errors="replace")}
    return _records(payload, where) if kind in _PAX else {}


def _records(payload: bytes, where: str) -> dict[str, str]:
    """What matters of a pax header: records `LENGTH KEY=VALUE` and a line end, where LENGTH counts all of it."""
    found: dict[str, str] = {}
    position = 0
    while position < len(payload):
        blank = payload.find(b" ", position, position + 20)
        length = _decimal(payload[position : max(position, blank)].decode("latin-1"), where)
        record = payload[blank + 1 : position + length - 1]
        key, equals, value = record.partition(b"=")
        if not equals or position + length > len(payload):
            raise damaged(where, Message("a header that cannot be read"))
        if key in (b"path", b"size"):
            found[key.decode()] = value.decode(errors="replace")
        elif key.startswith(b"GNU.sparse"):
            found["GNU.sparse"] = ""
        position += length
    return found


def _decimal(digits: str, where: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
        raise damaged(where, Message("a header that cannot be read"))
    return int(digits)
