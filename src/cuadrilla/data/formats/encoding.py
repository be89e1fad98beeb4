"""Detects a text's encoding from its first `HEAD_BYTES` (more than any book has). The first rule that fits decides:

1. The byte-order mark of UTF-16.
2. Strictly valid UTF-8.
3. UTF-8 with invalid bytes among it. These are read as Windows-1252, from which such files were patched together.
4. The one of Windows-1252, Mac Roman and code page 850 in which most bytes above 127 are letters of Spanish.
5. The choice of charset-normalizer. It does not decide alone: of 60 novels in Windows-1252 it reads 40 wrong, in Mac
   Roman 24 (3.5.2; with the encodings of rule 4 to choose from, 0 and 22). Rule 4 reads all of them right.

A file with more than one control character in a hundred bytes is refused.
"""

import codecs
import io
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

from cuadrilla.data.formats.files import CHUNK_BYTES
from cuadrilla.errors import DataError

HEAD_BYTES = 2**23
MAX_CONTROL_SHARE = 0.01
MAX_ACCENT_SHARE = 0.3
"""Maximum share of bytes above 127 in Spanish text, which has about 3 % accented letters. More is another script."""
UTF8 = "utf-8"
MIN_MIXED, MIXED_SHARE = 5, 0.02
"""Rule 3 needs more valid letters above 127 than this number, and than this share of the invalid ones."""

_SPANISH = "áéíóúüñÁÉÍÓÚÜÑ¿¡ªº"
_SINGLE_BYTE = ("cp1252", "mac_roman", "cp850")
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\n\v\f\r\x1a\x1b")
_HIGH = bytes(range(128, 256))


def decoded(head: bytes, stream: IO[bytes], encoding: str) -> Iterator[str]:
    """The text in pieces cut anywhere, with LF line ends. Invalid bytes are read as Windows-1252 in UTF-8; in other
    encodings they become U+FFFD."""
    codecs.register_error("cp1252", _as_cp1252)
    name, errors = ("utf-8-sig", "cp1252") if encoding == UTF8 else (encoding, "replace")
    inner = codecs.getincrementaldecoder(name)(errors)
    decoder = io.IncrementalNewlineDecoder(inner, translate=True)
    yield decoder.decode(head)
    while chunk := stream.read(CHUNK_BYTES):
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def _as_cp1252(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


def detect(head: bytes, *, where: str) -> str:
    """The encoding of a text, from its beginning. Raises DataError if it is binary, or if no encoding is found."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    share = _count(head, _CONTROLS) / max(1, len(head))
    if share > MAX_CONTROL_SHARE:
        raise DataError(
            "{where} is not text: {share:.0%} of its bytes are control characters",
            where=where,
            share=share,
            hint="give plain text (.txt, .md); convert documents first",
        )
    with suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a letter that the head cuts in two is no error
        return UTF8
    text = head.decode(errors="replace")
    num_bad = text.count("\ufffd") - head.count("\ufffd".encode())
    num_good = len(text) - num_bad - (len(head) - _count(head, _HIGH))
    return UTF8 if num_good > max(MIN_MIXED, MIXED_SHARE * num_bad) else _narrow_encoding(head, where=where)


def _narrow_encoding(raw: bytes, *, where: str) -> str:
    """The single-byte encoding in which most bytes above 127 are Spanish, else charset-normalizer's choice."""
    num_spanish, best = max((_count(raw, _SPANISH.encode(each, "ignore")), each) for each in _SINGLE_BYTE)
    num_high = _count(raw, _HIGH)
    if num_high <= MAX_ACCENT_SHARE * len(raw) and num_spanish >= 0.5 * num_high:
        return best
    from charset_normalizer import from_bytes

    begin = max(0, len(raw) - len(raw.lstrip(bytes(range(128)))) - 2**10)
    guess = from_bytes(raw[begin : begin + CHUNK_BYTES]).best()
    if guess is None:
        hint = "convert it to UTF-8, for example with iconv"
        raise DataError("{where}: cannot detect its encoding", where=where, hint=hint)
    return str(guess.encoding)


def _count(raw: bytes, wanted: bytes) -> int:
    return len(raw) - len(raw.translate(None, wanted))
