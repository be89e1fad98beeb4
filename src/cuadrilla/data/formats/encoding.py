"""In which encoding a text is, decided from all of its bytes without holding them.

The first rule that applies: a byte order mark; strictly valid UTF-8; UTF-16 without a mark (zeros on one side); UTF-8
with damage (at least ten good multi-byte characters for each bad sequence: bad ones become U+FFFD); the single-byte
encoding (Windows-1252 or its subset ISO-8859-1, Mac Roman, code page 850) whose reading has most letters of Spanish;
and for text that none of these fits, what charset-normalizer finds.

Anything that begins like another kind of file, or has more than one control character in a hundred bytes, is refused.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuadrilla.errors import DataError

MAX_CONTROL_SHARE = 0.01
MAX_ACCENT_SHARE = 0.3
"""Spanish has some 3 % of accented letters; text of which more is above 127 is in another script."""

_SIGNATURES = {
    b"PK\x03\x04": "a zip archive or a torch file",
    b"\x80\x02": "a Python pickle",
    b"\x80\x03": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x80\x05": "a Python pickle",
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"%PDF": "a PDF",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x7fELF": "a program",
    b"PAR1": "parquet",
    b"SQLite": "a database",
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
_GUTENBERG = re.compile(rb"START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a text, or a stream of texts, turned out to be."""

    encoding: str
    num_bytes: int
    """Of text, unpacked and without markup."""
    licence: str = "unknown"
    """What the text itself says: Project Gutenberg's do at their beginning, TEI in its header."""


def decoded(chunks: Iterable[bytes], encoding: str) -> Iterator[str]:
    """The text in pieces cut anywhere; bytes that the encoding cannot hold become U+FFFD."""
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in chunks:
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def detect(chunks: Iterable[bytes], *, where: str) -> Finding:
    """Read a text once. Raises DataError if it is binary or in no encoding we can tell."""
    high = np.zeros(256, dtype=np.int64)  # how often each byte above 127 occurs
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    head = foreign = b""
    num_bytes = num_characters = num_damaged = num_controls = 0
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
    tail = decoder.decode(b"", final=True)
    num_damaged += len(tail)
    num_good = num_characters + len(tail) - (num_bytes - int(high.sum())) - num_damaged
    encoding = _wide_encoding(head)
    if encoding is None:
        _refuse_binary(where, head=head, control_share=num_controls / max(1, num_bytes))
        damaged = num_damaged > 0 and num_good < 10 * num_damaged
        encoding = _narrow_encoding(where, sample=foreign, high=high, num_bytes=num_bytes) if damaged else "utf-8"
    licence = "Project Gutenberg License" if _GUTENBERG.search(head.upper()) else "unknown"
    return Finding(encoding=encoding, num_bytes=num_bytes, licence=licence)


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
            raise DataError(f"{where} is not text but {kind}", hint=hint)
    if control_share > MAX_CONTROL_SHARE:
        raise DataError(f"{where} is not text: {control_share:.0%} of its bytes are control characters", hint=hint)


def _narrow_encoding(where: str, *, sample: bytes, high: NDArray[np.int64], num_bytes: int) -> str:
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
        raise DataError(f"{where}: cannot tell its encoding", hint="convert it to UTF-8, for example with iconv")
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
