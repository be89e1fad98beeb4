"""From decoded text to documents: repair the text, count the repairs, cut at blank lines, choose what is held out.

What happens to odd text (the `counts` go into the manifest)
* Line ends: CRLF and CR become LF. Vertical tab, form feed, NEL (U+0085) and U+2028 become LF; U+2029 a blank line.
* NUL and the other control characters, U+FEFF inside the text and the noncharacters U+FFFE and U+FFFF are dropped.
* Bytes that are invalid in the file's encoding arrive as U+FFFD, stay, and are counted. Halves of surrogate pairs,
  which JSON can contain, become U+FFFD and are counted, too.
* A line of UTF-8 that was read in another encoding and saved again (`Ã¡` for `á`) is repaired by ftfy, and counted.
* Letters are composed (NFC): a decomposed ñ becomes one character. Nothing else is normalised: «», —, NBSP stay.
* Blanks at the start and the end of a line are removed. Two or more blank lines become one.
* Prose that was broken at a fixed width, as Project Gutenberg's, is joined again. A line is joined to the next one if
  the next one's first word would not have fitted. Verses stay, since they are shorter.
* A Project Gutenberg header, footer and credits are removed; their characters are counted.

What a document is
* A text of at most `MAX_DOCUMENT` = 20,000 characters is one document.
* A longer text is cut at blank lines into documents of 5,000 to 20,000 characters. The paragraph after a blank line
  decides whether to cut there (one in eight begins a document), not its distance from the start. So two editions with
  different prefaces are cut at the same places from the next cut on, and their common chapters are found as duplicates.
* A paragraph longer than 20,000 characters is cut at line ends, and a line longer than that at a blank.

Which documents are held out
* By text: a text (a file, a record) is held out whole, because a model that has read half of a
  novel finds the other half easy. It is held out if the hash of its documents, read as a fraction, is below
  `val_fraction`, but not if it has more than `MAX_SHARE` times the wanted size. By document: each one by its own hash.
* So a text stays on its side when other files are added, and one that occurs twice (it is kept once) has one side.
* If no hash is below `val_fraction`, the text or document with the lowest hash is held out. A corpus of a single
  document is cut finer, at 2,000 or 200 characters.

What is dropped
* Text that is unlike any book: mostly figures and marks, words without end, the same lines over and over. Verse,
  dialogue, old spelling, lists of chapters and other languages are kept.
* Web pages need stricter filters. Filter them first, for example with datatrove (FineWeb-2's rules for Spanish:
  https://github.com/huggingface/fineweb-2, configs/spa_Latn.yml).

A text is read in pieces and never held whole in memory, however long its lines are. It is cleaned in sections of about
a million characters, each by itself; the end of a section ends a document.
"""

import hashlib
import itertools
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from ftfy import fix_encoding
from numpy.typing import NDArray

MAX_DOCUMENT = 20_000
"""Maximum number of characters in a document."""
SECTION_CHARACTERS = 2**20
"""A longer text is cleaned in sections of this size, so that several processes share it."""
BOUNDARY_RARITY = 8
WIDTHS, MIN_WRAPPED_LINES, WRAPPED_PERCENT, MIN_FULL = range(55, 101), 20, 95, 0.7
"""A text was broken at a fixed width if, of its lines that another line follows, there are `MIN_WRAPPED_LINES` or more,
`WRAPPED_PERCENT` of them fit a width in `WIDTHS`, and `MIN_FULL` of them had no room for the next line's first word."""
MAX_SHARE = 2.0
"""A text of more than this many times the characters to hold out stays in `train`."""
MAX_REPEATED = 0.5
"""Maximum share of a document's characters in lines that repeat an earlier line."""
MIN_LETTERS = 0.4
"""Minimum share of letters among the bytes that are not blank."""
WORD_LENGTH = (1.5, 40)
"""Bounds of the mean length of a word, in bytes."""

_BLANKS = " \t\u00a0"
_BEGINS, _HYPHEN = re.compile(r"[-–—«*_\d\s]"), re.compile(r"\w-$")
_ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffd-\uffff\ud800-\udfff]")
_MAY_BE_TWICE = re.compile("[\u00c2\u00c3\u00e2][\u0080-\u00bf\u20ac]")
_BREAKS = {"\v": "\n", "\f": "\n", "\x85": "\n", "\u2028": "\n", "\u2029": "\n\n"}
_GUTENBERG_START = re.compile(r"^\*\*\* ?START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK[^\n]*\n", re.M | re.I)
_GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THIS|THE) PROJECT GUTENBERG EBOOK|End of (?:the )?Project Gutenberg)", re.M | re.I
)
_CREDITS = re.compile(r"\s*(?:Produced by|E-text prepared by|Transcribed by)[^\n]*(?:\n[^\n]+)*\n", re.I)
_IS_LETTER = np.array([byte >= 128 or chr(byte).isalpha() for byte in range(256)])
_IS_BLANK = np.array([chr(byte).isspace() for byte in range(128)] + [False] * 128)
_TO_BLANK = bytes(32 if chr(byte).isspace() and byte < 128 else byte for byte in range(256))


def sections(pieces: Iterable[str], counts: Counter[str], *, size: int = SECTION_CHARACTERS) -> Iterator[str]:
    """Cut one text into sections of about `size` characters, without Project Gutenberg's header, credits and footer.

    The cuts depend only on the text, not on the pieces in which it arrives.
    """
    rest = iter(pieces)
    first = next(rest, "")
    if start := _GUTENBERG_START.search(first):
        body = first[(_CREDITS.match(first, start.end()) or start).end() :]
        counts["gutenberg_characters_dropped"] += len(first) - len(body)
        first = body
    for section in _cut(itertools.chain([first], rest), size):
        end = _GUTENBERG_END.search(section) if start else None
        if end:
            counts["gutenberg_characters_dropped"] += len(section) - end.start()
            yield section[: end.start()]
            return
        yield section


def _cut(pieces: Iterable[str], size: int) -> Iterator[str]:
    """Sections that end at the first blank line after `size` characters, or else at a line end, or else at a blank."""
    text = ""
    for piece in pieces:
        text += piece
        while len(text) > 2 * size:
            end = text.find("\n\n", size, size + size // 2) + 2
            if end < 2:
                end = text.find("\n", size + size // 2, 2 * size) + 1 or _cut_point(text, 2 * size)
            yield text[:end]
            text = text[end:]
    if text:
        yield text


def documents(section: str, *, counts: Counter[str], maximum: int = MAX_DOCUMENT) -> Iterator[str]:
    """The clean documents of a section; none is empty. `counts` grows by what was repaired or dropped."""
    return _blocks(list(_units(_clean_piece(section, counts), maximum=maximum)), maximum=maximum)


def document_hash(text: str) -> bytes:
    """A hash of 16 bytes, equal for documents that differ only in white space (blanks, NBSP, tabs, line ends)."""
    raw = text.encode().replace(b"\xc2\xa0", b" ").translate(_TO_BLANK).strip(b" ")
    while b"  " in raw:
        raw = raw.replace(b"  ", b" ")
    return hashlib.blake2b(raw, digest_size=16).digest()


def reason_to_drop(text: str) -> str | None:
    """The first rule that a document breaks, as a name for `counts`; None if it is kept."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "empty"
    num_characters = sum(map(len, lines))
    if num_characters - sum(map(len, set(lines))) > MAX_REPEATED * num_characters:
        return "repeated_lines"
    raw = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
    is_blank = _IS_BLANK[raw]
    num_words = int(np.count_nonzero(is_blank[:-1] & ~is_blank[1:])) + 1
    num_words += int(np.count_nonzero(raw >= 0xE3))  # from U+3000 on, scripts put no blanks between words
    num_visible = len(raw) - int(np.count_nonzero(is_blank))
    if int(np.count_nonzero(_IS_LETTER[raw])) < MIN_LETTERS * num_visible:
        return "few_letters"
    least, most = WORD_LENGTH
    return None if least <= num_visible / num_words <= most else "word_length"


def split_documents(hashes: NDArray[np.uint64], *, val_fraction: float) -> NDArray[np.bool_]:
    """Which documents are held out, by hash alone. Of two or more, at least one is held out and at least one is not."""
    is_val = hashes < np.uint64(val_fraction * 2**64)
    if len(hashes) >= 2:
        is_val[np.argmin(hashes)] = True
        is_val[np.argmax(hashes)] = False
    return np.asarray(is_val)


def split_texts(
    hashes: NDArray[np.uint64], texts: NDArray[np.uint32], characters: NDArray[np.uint32], *, val_fraction: float
) -> NDArray[np.bool_]:
    """Which documents are held out if each text is held out whole or not at all. For each document: the hash of its
    text, the number of its text, its characters."""
    _, first, of_text = np.unique(texts, return_index=True, return_inverse=True)
    shares = np.bincount(of_text, weights=characters) / max(1, int(characters.sum()))
    fits = shares <= max(MAX_SHARE * val_fraction, shares.min(initial=1.0))
    is_val = np.zeros(len(first), dtype=np.bool_)
    is_val[fits] = split_documents(hashes[first[fits]], val_fraction=val_fraction)
    if len(first) >= 2 and not is_val.any():
        is_val[np.argmin(shares)] = True
    return np.asarray(is_val[of_text])


def _cut_point(text: str, limit: int) -> int:
    """Where to cut a line of more than `limit` characters: after its last blank if there is one."""
    return text.rfind(" ", limit // 2, limit) + 1 or limit


def _clean_piece(piece: str, counts: Counter[str]) -> str:
    """Repair characters, then strip blanks and join wrapped lines."""
    text = piece.replace("\r\n", "\n").replace("\r", "\n")
    text = _decoded_once(text, counts) if _MAY_BE_TWICE.search(text) else text
    text = unicodedata.normalize("NFC", _ODD.sub(_repaired, text))
    counts["replacement_characters"] += text.count("\ufffd")
    return "\n".join(_unwrapped([line.strip(_BLANKS) for line in text.split("\n")], counts))


def _unwrapped(lines: list[str], counts: Counter[str]) -> list[str]:
    """Join lines that were broken at a fixed width. Returns `lines` unchanged if most of them were not."""
    followed = sorted(len(line) for line, after in itertools.pairwise(lines) if line and after)
    width = followed[len(followed) * WRAPPED_PERCENT // 100] if len(followed) >= MIN_WRAPPED_LINES else 0
    joined, before = lines[:1], lines[0]
    for line in lines[1:]:
        if before and line and not _BEGINS.match(line) and len(before) + 1 + len(line.partition(" ")[0]) > width:
            joined[-1] += line if _HYPHEN.search(before) else f" {line}"
        else:
            joined.append(line)
        before = line
    if width not in WIDTHS or len(lines) - len(joined) < MIN_FULL * len(followed):
        return lines
    counts["lines_joined"] += len(lines) - len(joined)
    return joined


def _repaired(match: re.Match[str]) -> str:
    character = match.group()
    is_unknown = character == "\ufffd" or "\ud800" <= character <= "\udfff"
    return "\ufffd" if is_unknown else _BREAKS.get(character, "")


def _decoded_once(text: str, counts: Counter[str]) -> str:
    """Repair lines that were encoded twice."""
    lines = text.split("\n")
    fixed = [fix_encoding(line) if _MAY_BE_TWICE.search(line) else line for line in lines]
    counts["lines_encoded_twice"] += sum(map(str.__ne__, fixed, lines))
    return "\n".join(fixed)


def _units(text: str, *, maximum: int) -> Iterator[str]:
    """Paragraphs. A paragraph longer than `maximum` comes as its lines, a line longer than that as its parts. Each
    begins with the line ends that separate it from the one before."""
    for block in text.split("\n\n"):
        paragraph = block.strip("\n")
        if len(paragraph) > maximum:
            yield from _line_units(paragraph, maximum=maximum)
        elif paragraph:
            yield "\n\n" + paragraph


def _line_units(paragraph: str, *, maximum: int) -> Iterator[str]:
    separator = "\n\n"
    for line in paragraph.split("\n"):
        rest = line
        while len(rest) > maximum:
            cut = _cut_point(rest, maximum)
            if part := rest[:cut].rstrip(_BLANKS):
                yield separator + part
                separator = "\n"
            rest = rest[cut:].lstrip(_BLANKS)
        if rest:
            yield separator + rest
            separator = "\n"


def _blocks(units: list[str], *, maximum: int) -> Iterator[str]:
    """Join units into one document if they fit, else into documents of `maximum` / 4 to `maximum` characters."""
    cutting = sum(map(len, units)) > maximum
    block = ""
    for unit in units:
        text = unit.lstrip("\n")
        begins = cutting and len(block) >= maximum // 4 and zlib.crc32(text.encode()) % BOUNDARY_RARITY == 0
        if block and (begins or len(block) + len(unit) > maximum):
            yield block
            block = ""
        block += unit if block else text
    if block:
        yield block
