"""In which encoding a text is, decided from its first `HEAD_BYTES`: from all of it, unless it is longer than any book.

The first rule that applies: a byte order mark; strictly valid UTF-8; UTF-16 without a mark (zeros on one side); UTF-8
with damage (at least ten good multi-byte characters for each bad sequence: bad ones become U+FFFD); the single-byte
encoding (Windows-1252 or its subset ISO-8859-1, Mac Roman, code page 850) in which most bytes above 127 are letters of
Spanish; and for text that none of these fits, what charset-normalizer finds. It does not decide alone: of 60 novels as
Windows-1252 it reads 40 wrong, as Mac Roman 24 (3.5.2; with these three encodings to choose from, 0 and 22), the rule
none.

Anything that begins like another kind of file, or has more than one control character in a hundred bytes, is refused.

Two kinds of damage are counted, and repaired if that is asked for: text that was UTF-8, was read as something else and
written again (`Ã¡` for `á`), and files of which some lines are UTF-8 and others are not.
"""

import codecs
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from cuadrilla.data.formats.packing import CHUNK_BYTES
from cuadrilla.data.formats.record import BadFileError
from cuadrilla.messages import Message

HEAD_BYTES = 2**23
MAX_CONTROL_SHARE = 0.01
MAX_ACCENT_SHARE = 0.3
"""Spanish has some 3 % of accented letters; text of which more is above 127 is in another script."""

CONVERT = Message("convert it to UTF-8, for example with iconv")
REPAIR = Message("some of it is UTF-8, some is not: --repair reads it line by line")
MIXED, REPAIRED = "utf-8 and cp1252", " (repaired)"
MIN_MIXED, MIXED_SHARE = 5, 0.02
"""Letters of either encoding in a file of two; fewer are accidents."""
MIN_TWICE = 5
MAX_LINE = 2**20

_SIGNATURES = {
    b"PK\x03\x04": Message("a zip archive or a torch file"),
    b"\x80\x02": Message("a Python pickle"),
    b"\x80\x03": Message("a Python pickle"),
    b"\x80\x04": Message("a Python pickle"),
    b"\x80\x05": Message("a Python pickle"),
    b"\x1f\x8b": "gzip",
    b"%PDF": Message("a PDF"),
    b"PAR1": "parquet",
}
# Longest first: the mark of UTF-32-LE begins with that of UTF-16-LE.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SPANISH = "áéíóúüñÁÉÍÓÚÜÑ¿¡ªº"
_SINGLE_BYTE = ("cp1252", "mac_roman", "cp850")
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\n\v\f\r\x1a\x1b")
_HIGH = bytes(range(128, 256))
_TWICE = re.compile(rb"\xc3[\x82\x83]\xc2[\x80-\xbf]|\xc3\xa2\xe2\x82\xac")
_MAY_BE_TWICE = re.compile("[\u00c2\u00c3\u00e2][\u0080-\u00bf\u20ac]")
_GUTENBERG = re.compile(rb"START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a text turned out to be."""

    encoding: str
    num_twice: int = 0
    """Characters that were encoded twice."""
    is_mixed: bool = False
    """Some of it is UTF-8, and some is not."""
    licence: str = "unknown"
    """Project Gutenberg's texts say it at their beginning."""

    @property
    def damage(self) -> str:
        """What could be repaired, in words."""
        if self.is_mixed:
            return Message("it is in two encodings")
        if self.num_twice:
            return Message("{num_twice:,} characters were encoded twice", num_twice=self.num_twice)
        return ""

    def repaired(self) -> "Finding":
        """The same, to be read with repairs."""
        return replace(self, encoding=(MIXED if self.is_mixed else self.encoding) + REPAIRED)


def read_text(path: Path) -> str:
    """One file as text in whatever encoding, whatever its name. Raises DataError, OSError."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        return "".join(decoded(head, file, detect(head, where=str(path)).encoding, where=str(path)))


def decoded(head: bytes, stream: IO[bytes], encoding: str, *, where: str) -> Iterator[str]:
    """The text in pieces cut anywhere; bytes that the encoding cannot hold become U+FFFD.

    Raises BadFileError if what follows the head is in another encoding.
    """
    if encoding.endswith(REPAIRED):
        yield from _repaired(_chunks(head, stream), encoding.removesuffix(REPAIRED))
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    yield decoder.decode(head)
    num_high = num_damaged = 0
    while chunk := stream.read(CHUNK_BYTES):
        text = decoder.decode(chunk)
        num_high += len(chunk) - len(chunk.translate(None, _HIGH))
        num_damaged += text.count("\ufffd")
        yield text
    yield decoder.decode(b"", final=True)
    if num_damaged > max(MIN_MIXED, num_high / 10):
        raise BadFileError("{where}: it is {encoding} only at first", where=where, encoding=encoding, hint=REPAIR)


def detect(head: bytes, *, where: str, repair: bool = False) -> Finding:
    """What a text is, from its beginning; `repair`: it may be in two encodings.

    Raises BadFileError if it is binary or in no encoding we can tell.
    """
    raw = head if len(head) < HEAD_BYTES else head.rstrip(_HIGH)
    licence = "Project Gutenberg License" if _GUTENBERG.search(raw[:CHUNK_BYTES].upper()) else "unknown"
    if encoding := _wide_encoding(raw[:CHUNK_BYTES]):
        return Finding(encoding=encoding, licence=licence, num_twice=_num_twice(raw, encoding))
    _refuse_binary(raw, where=where)
    with suppress(UnicodeDecodeError):
        raw.decode()
        return Finding(encoding="utf-8", licence=licence, num_twice=_num_twice(raw, "utf-8"))
    text = raw.decode(errors="replace")
    num_damaged = text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
    num_good = len(text) - len(raw.translate(None, _HIGH)) - num_damaged
    is_mixed = min(num_good, num_damaged) > max(MIN_MIXED, MIXED_SHARE * (num_good + num_damaged))
    encoding = "utf-8"
    if not (num_good >= 10 * num_damaged or (is_mixed and repair)):
        encoding = _narrow_encoding(raw, where=where, hint=REPAIR if is_mixed else CONVERT)
    return Finding(encoding=encoding, num_twice=_num_twice(raw, encoding), is_mixed=is_mixed, licence=licence)


def _num_twice(raw: bytes, encoding: str) -> int:
    num_twice = len(_TWICE.findall(raw)) if encoding.startswith("utf-8") else 0
    return num_twice if num_twice >= MIN_TWICE else 0


def _repaired(chunks: Iterator[bytes], encoding: str) -> Iterator[str]:
    """Line by line: UTF-8 where it is, else the Windows encoding; what was encoded twice is put right by ftfy."""
    from ftfy import fix_encoding

    for line in _lines(chunks):
        try:
            text = line.decode("utf-8" if encoding == MIXED else encoding)
        except UnicodeDecodeError:
            text = line.decode("cp1252" if encoding == MIXED else encoding, errors="replace")
        yield fix_encoding(text) if _MAY_BE_TWICE.search(text) else text


def _chunks(head: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    for start in range(0, len(head), CHUNK_BYTES):
        yield head[start : start + CHUNK_BYTES]
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their ends; one of more than `MAX_LINE` bytes is cut behind its last blank, or ASCII."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)
        if len(rest) > MAX_LINE:
            cut = rest.rfind(b" ") + 1 or len(rest.rstrip(_HIGH)) or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
    yield rest


def _wide_encoding(head: bytes) -> str | None:
    """The encoding that a byte order mark or the place of the zeros betrays."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    num_pairs = len(head) // 2
    even, odd = (head[start : 2 * num_pairs : 2].count(0) / max(1, num_pairs) for start in (0, 1))
    if odd > 0.7 and even < 0.01:
        return "utf-16-le"
    if even > 0.7 and odd < 0.01:
        return "utf-16-be"
    return None


def _refuse_binary(raw: bytes, *, where: str) -> None:
    hint = "give plain text (.txt, .md); unpack archives and convert documents first"
    for signature, kind in _SIGNATURES.items():
        if raw.startswith(signature):
            raise BadFileError("{where} is not text but {kind}", where=where, kind=kind, hint=hint)
    share = (len(raw) - len(raw.translate(None, _CONTROLS))) / max(1, len(raw))
    if share > MAX_CONTROL_SHARE:
        raise BadFileError(
            "{where} is not text: {share:.0%} of its bytes are control characters", where=where, share=share, hint=hint
        )


def _narrow_encoding(raw: bytes, *, where: str, hint: str) -> str:
    """The single-byte encoding in which the bytes above 127 are Spanish, else charset-normalizer's choice."""
    counts = np.bincount(np.frombuffer(raw, dtype=np.uint8), minlength=256)[128:]
    scores = {
        encoding: sum(
            int(count)
            for character, count in zip(_HIGH.decode(encoding, errors="replace"), counts, strict=True)
            if character in _SPANISH
        )
        for encoding in _SINGLE_BYTE
    }
    best = max(_SINGLE_BYTE, key=lambda encoding: scores[encoding])
    num_high = int(counts.sum())
    if num_high <= MAX_ACCENT_SHARE * len(raw) and scores[best] >= 0.5 * num_high:
        return "iso-8859-1" if best == "cp1252" and not counts[:32].any() else best
    from charset_normalizer import from_bytes

    begin = max(0, len(raw) - len(raw.lstrip(bytes(range(128)))) - 2**10)
    guess = from_bytes(raw[begin : begin + CHUNK_BYTES]).best()
    if guess is None:
        raise BadFileError("{where}: cannot detect its encoding", where=where, hint=hint)
    return str(guess.encoding)
