"""In which encoding a text is, decided from all of its bytes without holding them.

The first rule that applies: a byte order mark; strictly valid UTF-8; UTF-16 without a mark (zeros on one side); UTF-8
with damage (at least ten good multi-byte characters for each bad sequence: bad ones become U+FFFD); the single-byte
encoding (Windows-1252 or its subset ISO-8859-1, Mac Roman, code page 850) whose reading has most letters of Spanish;
and for text that none of these fits, what charset-normalizer finds.

Anything that begins like another kind of file, or has more than one control character in a hundred bytes, is refused.

Two kinds of damage are counted, and repaired if that is asked for: text that was UTF-8, was read as something else and
written again (`Ã¡` for `á`), and files of which some lines are UTF-8 and others are not.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.formats.record import BadFileError
from cuadrilla.messages import Message

MAX_CONTROL_SHARE = 0.01
MAX_ACCENT_SHARE = 0.3
"""Spanish has some 3 % of accented letters; text of which more is above 127 is in another script."""

CONVERT = Message("convert it to UTF-8, for example with iconv")
REPAIR = Message("some of it is UTF-8, some is not: --repair reads it line by line")
MIXED, REPAIRED = "utf-8 and cp1252", " (repaired)"
LEAST_MIXED, MIXED_SHARE = 5, 0.02
"""Letters of either encoding in a file of two; fewer are accidents."""
LEAST_TWICE = 5
LONGEST_LINE = 2**20

_SIGNATURES = {
    b"PK\x03\x04": Message("a zip archive or a torch file"),
    b"\x80\x02": Message("a Python pickle"),
    b"\x80\x03": Message("a Python pickle"),
    b"\x80\x04": Message("a Python pickle"),
    b"\x80\x05": Message("a Python pickle"),
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"%PDF": Message("a PDF"),
    b"\x89PNG": Message("a PNG image"),
    b"\xff\xd8\xff": Message("a JPEG image"),
    b"\x7fELF": Message("a program"),
    b"PAR1": "parquet",
    b"SQLite": Message("a database"),
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
_ALSO = "«»“”‘’—–…·€" + "àâäãåæçèêëìîïòôöõøœùûß" + "ÀÂÄÃÅÆÇÈÊËÌÎÏÒÔÖÕØŒÙÛ"
_SINGLE_BYTE = ("cp1252", "mac_roman", "cp850")
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\n\v\f\r\x1a\x1b")
_TWICE = re.compile(rb"\xc3[\x82\x83]\xc2[\x80-\xbf]|\xc3\xa2\xe2\x82\xac")
_MAY_BE_TWICE = re.compile("[\u00c2\u00c3\u00e2][\u0080-\u00bf\u20ac]")
_HIGH = bytes(range(128, 256))
_GUTENBERG = re.compile(rb"START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a text, or a stream of texts, turned out to be."""

    encoding: str
    num_bytes: int
    """Of text, unpacked and without markup."""
    num_twice: int = 0
    """Characters that were encoded twice."""
    is_mixed: bool = False
    """Some of it is UTF-8, and some is not."""
    licence: str = "unknown"
    """What the text itself says: Project Gutenberg's do at their beginning, TEI in its header."""

    @property
    def damage(self) -> str:
        """What could be repaired, in words."""
        if self.num_twice and self.is_mixed:
            return Message(
                "{num_twice:,} characters were encoded twice, and the file is in two encodings",
                num_twice=self.num_twice,
            )
        if self.num_twice:
            return Message("{num_twice:,} characters were encoded twice", num_twice=self.num_twice)
        return Message("it is in two encodings") if self.is_mixed else ""

    def repaired(self) -> "Finding":
        """The same, to be read with repairs."""
        return replace(self, encoding=(MIXED if self.is_mixed else self.encoding) + REPAIRED)


def decoded(chunks: Iterable[bytes], encoding: str) -> Iterator[str]:
    """The text in pieces cut anywhere; bytes that the encoding cannot hold become U+FFFD."""
    if encoding.endswith(REPAIRED):
        yield from _repaired(chunks, encoding.removesuffix(REPAIRED))
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in chunks:
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def detect(chunks: Iterable[bytes], *, where: str, repair: bool = False) -> Finding:
    """Read a text once; `repair`: it may be in two encodings.

    Raises BadFileError if it is binary or in no encoding we can tell.
    """
    high = np.zeros(256, dtype=np.int64)  # how often each byte above 127 occurs
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    head = foreign = b""
    num_bytes = num_characters = num_damaged = num_controls = num_twice = 0
    for chunk in chunks:
        head = head or chunk
        foreign = foreign or (b"" if chunk.isascii() else chunk)
        num_bytes += len(chunk)
        num_controls += len(chunk) - len(chunk.translate(None, _CONTROLS))
        raw = np.frombuffer(chunk, dtype=np.uint8)
        high += np.bincount(raw[raw > 127], minlength=256)
        text = decoder.decode(chunk)
        num_characters += len(text)
        num_damaged += text.count("\ufffd") - chunk.count(b"\xef\xbf\xbd")
        num_twice += len(_TWICE.findall(chunk))
    tail = decoder.decode(b"", final=True)
    num_damaged += len(tail)
    num_good = num_characters + len(tail) - (num_bytes - int(high.sum())) - num_damaged
    is_mixed = False
    encoding = _wide_encoding(head)
    if encoding is None:
        _refuse_binary(where, head=head, control_share=num_controls / max(1, num_bytes))
        is_mixed = min(num_good, num_damaged) > max(LEAST_MIXED, MIXED_SHARE * (num_good + num_damaged))
        if num_damaged == 0 or num_good >= 10 * num_damaged or (is_mixed and repair):
            encoding = "utf-8"
        else:
            encoding = _narrow_encoding(
                where, sample=foreign, high=high, num_bytes=num_bytes, hint=REPAIR if is_mixed else CONVERT
            )
    licence = "Project Gutenberg License" if _GUTENBERG.search(head.upper()) else "unknown"
    return Finding(
        encoding=encoding,
        num_bytes=num_bytes,
        num_twice=num_twice if num_twice >= LEAST_TWICE and encoding.startswith("utf-8") else 0,
        is_mixed=is_mixed,
        licence=licence,
    )


def _repaired(chunks: Iterable[bytes], encoding: str) -> Iterator[str]:
    """Line by line: UTF-8 where it is, else the Windows encoding; what was encoded twice is put right by ftfy."""
    from ftfy import fix_encoding

    for line in _lines(chunks):
        try:
            text = line.decode("utf-8" if encoding == MIXED else encoding)
        except UnicodeDecodeError:
            text = line.decode("cp1252" if encoding == MIXED else encoding, errors="replace")
        yield fix_encoding(text) if _MAY_BE_TWICE.search(text) else text


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their ends; one of more than `LONGEST_LINE` bytes is cut behind its last blank, or ASCII."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)
        if len(rest) > LONGEST_LINE:
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


def _refuse_binary(where: str, *, head: bytes, control_share: float) -> None:
    hint = "give plain text (.txt, .md); unpack archives and convert documents first"
    for signature, kind in _SIGNATURES.items():
        if head.startswith(signature):
            raise BadFileError("{where} is not text but {kind}", where=where, kind=kind, hint=hint)
    if control_share > MAX_CONTROL_SHARE:
        raise BadFileError(
            "{where} is not text: {share:.0%} of its bytes are control characters",
            where=where,
            share=control_share,
            hint=hint,
        )


def _narrow_encoding(where: str, *, sample: bytes, high: NDArray[np.int64], num_bytes: int, hint: str) -> str:
    """The single-byte encoding in which the bytes above 127 are Spanish, else charset-normalizer's choice."""
    counts = {byte: int(high[byte]) for byte in range(128, 256) if high[byte]}
    scores = {encoding: _spanishness(counts, encoding) for encoding in _SINGLE_BYTE}
    best = max(_SINGLE_BYTE, key=lambda encoding: scores[encoding])
    is_western = sum(counts.values()) <= MAX_ACCENT_SHARE * num_bytes
    if is_western and scores[best] >= 0.5 * sum(counts.values()):
        only_latin1 = best == "cp1252" and not any(byte < 0xA0 for byte in counts)
        return "iso-8859-1" if only_latin1 else best
    from charset_normalizer import from_bytes

    guess = from_bytes(sample).best()
    if guess is None:
        raise BadFileError("{where}: cannot detect its encoding", where=where, hint=hint)
    return str(guess.encoding)


def _spanishness(counts: dict[int, int], encoding: str) -> float:
    """How many of these bytes read as letters of Spanish; other letters and punctuation count for less."""
    score = 0.0
    for byte, count in counts.items():
        character = bytes([byte]).decode(encoding, errors="replace")
        if character in _SPANISH:
            score += count
        elif character in _ALSO:
            score += 0.5 * count
    return score
