"""Where text comes from: local files and folders, and the built-in generator of stories.

Invariants
* Nothing depends on the order in which a file system lists names or a user types arguments: sources are sorted by
  name and content. Names are relative to the folder that was given, so no path of this machine enters a manifest.
* A file is read twice, in pieces: once to hash it and decide its encoding from all of its bytes, once for its text. If
  the two readings differ, the file changed meanwhile and the preparation stops.
* Only text is opened as text. Pickles, archives, images and anything with more than one control character in a
  hundred bytes are refused; nothing is unpickled, ever.

Encoding, first rule that applies: a byte order mark; strictly valid UTF-8; UTF-16 without a mark (zeros on one side);
UTF-8 with damage (at least ten good multi-byte characters for each bad sequence: bad ones become U+FFFD); the
single-byte encoding (Windows-1252 or its subset ISO-8859-1, Mac Roman, code page 850) whose reading has most letters
of Spanish; and for text that none of these fits, what charset-normalizer finds.

A new kind of source is a frozen dataclass with the fields of `TextFile`, a member of the union `TextSource`, and a
branch in `open_sources`.
"""

import codecs
import difflib
import hashlib
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from charset_normalizer import from_bytes
from numpy.typing import NDArray

from cuadrilla.data.cuentos import stories
from cuadrilla.errors import ConfigError, DataError

TEXT_SUFFIXES = (".txt", ".md")
CHUNK_BYTES = 2**20
MAX_STORIES = 10**8
MAX_CONTROL_SHARE = 0.01
MAX_ACCENT_SHARE = 0.3
"""Spanish has some 3 % of accented letters; text of which more is above 127 is in another script."""

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); units are the stage's own."""

_PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".npy", ".npz")
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
_CONTROLS = [byte for byte in range(32) if byte not in b"\t\n\v\f\r\x1a\x1b"] + [127]
_GUTENBERG = re.compile(rb"START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One local file, surveyed: its text is decoded piece by piece and never held whole."""

    path: Path
    name: str
    sha256: str
    num_bytes: int
    encoding: str
    licence: str

    @property
    def keeps_indentation(self) -> bool:
        """Markdown gives indentation a meaning (lists, code); in plain text it is layout."""
        return self.path.suffix.lower() == ".md"

    def texts(self) -> Iterator[Iterator[str]]:
        """One text, as decoded pieces cut anywhere. Raises DataError if the file is not what was surveyed."""
        yield self._pieces()

    def _pieces(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder(self.encoding)(errors="replace")
        digest = hashlib.sha256()
        for chunk in _chunks(self.path):
            digest.update(chunk)
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)
        if digest.hexdigest() != self.sha256:
            raise DataError(f"{self.path} changed while it was read", hint="wait for its writer, then run again")


@dataclass(frozen=True, kw_only=True)
class Stories:
    """The first `count` stories of the built-in generator, seed 0."""

    count: int
    name: str
    sha256: str
    num_bytes: int
    encoding: str = "utf-8"
    licence: str = "CC0-1.0 (generated)"
    keeps_indentation: bool = False

    def texts(self) -> Iterator[Iterator[str]]:
        """Each story is a text of its own."""
        return (iter((story,)) for story in stories(self.count, seed=0))


TextSource = TextFile | Stories


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the arguments of a preparation lead to."""

    sources: tuple[TextSource, ...]
    """Sorted by name and content."""
    skipped: tuple[str, ...]
    """Names of files that are not text by their suffix, sorted."""
    counts: Counter[str]
    """Files skipped, by reason. Hidden files are not counted: a `.DS_Store` must not change a manifest."""


@dataclass(kw_only=True)
class _Listing:
    files: dict[tuple[int, int], tuple[str, Path]] = field(default_factory=dict)
    """By device and inode, so that a file given twice is read once."""
    skipped: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def open_sources(specs: Sequence[str], *, exclude: Path, progress: Progress) -> Found:
    """List, hash and detect everything that `specs` name: files, folders, `cuentos:N`.

    `exclude` is a folder not to enter (the output). Raises DataError for what is missing, unreadable or not text,
    ConfigError for a malformed `cuentos:`.
    """
    listing = _Listing()
    counts_of_stories = set()
    for spec in specs:
        if spec.startswith("cuentos:"):
            counts_of_stories.add(_parse_stories(spec))
        elif not spec:
            raise ConfigError("a source is empty text", hint="give files or folders of .txt or .md, or cuentos:N")
        else:
            _list_path(Path(spec), listing, exclude=exclude.resolve())
    files = sorted(listing.files.values())
    total = sum(path.stat().st_size for _, path in files)
    found: list[TextSource] = []
    done = 0
    for name, path in files:
        progress("looking at the files", done, total)
        found.append(survey(path, name=name))
        done += found[-1].num_bytes
    if files:
        progress("looking at the files", total, total)
    found += [_survey_stories(count) for count in sorted(counts_of_stories)]
    found.sort(key=lambda source: (source.name, source.sha256))
    return Found(sources=tuple(found), skipped=tuple(sorted(listing.skipped)), counts=listing.counts)


def _parse_stories(spec: str) -> int:
    digits = spec.removeprefix("cuentos:")
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_STORIES:
        raise ConfigError(
            f"{spec!r} does not say how many stories", hint=f"write cuentos:40000, from 1 to {MAX_STORIES:,}"
        )
    return int(digits)


def _list_path(path: Path, listing: _Listing, *, exclude: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}", hint=_nearby(path)
        ) from error
    if stat.S_ISDIR(mode):
        _list_folder(path, listing, exclude=exclude)
    elif not stat.S_ISREG(mode):
        raise DataError(f"{path} is not a regular file", hint="give a file or a folder of .txt or .md")
    else:
        _check_suffix(path)
        _add(path, _portable(path.name), listing)


def _nearby(path: Path) -> str:
    """A hint that names a file spelled almost like `path`."""
    try:
        names = sorted(entry.name for entry in os.scandir(path.parent))
    except (OSError, ValueError):
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else "give files or folders of .txt or .md, or cuentos:N"


def _check_suffix(path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix in _PICKLE_SUFFIXES:
        raise DataError(
            f"{path} is not text: a {suffix} file can be a pickle, which runs code when opened",
            hint="give the text it was made from, as .txt or .md",
        )
    if suffix not in TEXT_SUFFIXES:
        raise DataError(
            f"{path}: {suffix or 'a file without suffix'} is not read as text",
            hint="if it is plain text, rename it to .txt",
        )


def _list_folder(folder: Path, listing: _Listing, *, exclude: Path) -> None:
    """Walk without entering hidden folders, links to folders (they can loop) or the output."""

    def fail(error: OSError) -> None:
        raise DataError(
            f"cannot list {error.filename}: {error.strerror}", hint="give yourself permission to read it"
        ) from error

    top = _portable(folder.resolve().name)
    for parent, folders, names in os.walk(folder, onerror=fail):
        here = Path(parent)
        folders[:] = [name for name in folders if not name.startswith(".") and (here / name).resolve() != exclude]
        for name in names:
            if name.startswith("."):
                continue
            path = here / name
            label = "/".join((top, *(_portable(part) for part in path.relative_to(folder).parts)))
            if path.suffix.lower() in TEXT_SUFFIXES and path.is_file():
                _add(path, label, listing)
            else:
                listing.counts["files_not_text"] += 1
                listing.skipped.append(label)


def _portable(name: str) -> str:
    """The same name on every machine: macOS decomposes letters, and Linux allows bytes that are not UTF-8."""
    return unicodedata.normalize("NFC", os.fsencode(name).decode("utf-8", errors="replace"))


def _add(path: Path, name: str, listing: _Listing) -> None:
    status = path.stat()
    key = (status.st_dev, status.st_ino)
    if key in listing.files:
        listing.counts["files_given_twice"] += 1
        name = min(name, listing.files[key][0], key=lambda label: (-label.count("/"), label))
    listing.files[key] = (name, path)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="check that the file exists and is yours to read"
        ) from error


def _survey_stories(count: int) -> Stories:
    digest = hashlib.sha256()
    num_bytes = 0
    for story in stories(count, seed=0):
        raw = story.encode() + b"\0"
        digest.update(raw)
        num_bytes += len(raw) - 1
    return Stories(count=count, name=f"cuentos:{count}", sha256=digest.hexdigest(), num_bytes=num_bytes)


def survey(path: Path, *, name: str) -> TextFile:
    """Read a file once: hash, size, encoding. Raises DataError if it is binary or in no encoding we can tell."""
    digest = hashlib.sha256()
    histogram = np.zeros(256, dtype=np.int64)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    head = foreign = b""
    num_bytes = num_characters = num_damaged = 0
    for chunk in _chunks(path):
        head = head or chunk
        foreign = foreign or (b"" if chunk.isascii() else chunk)
        num_bytes += len(chunk)
        digest.update(chunk)
        histogram += np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=256)
        text = decoder.decode(chunk)
        num_characters += len(text)
        num_damaged += text.count("\ufffd") - chunk.count(b"\xef\xbf\xbd")
    tail = decoder.decode(b"", final=True)
    num_damaged += len(tail)
    num_good = num_characters + len(tail) - int(histogram[:128].sum()) - num_damaged
    encoding = _wide_encoding(head)
    if encoding is None:
        _refuse_binary(path, head=head, histogram=histogram)
        damaged = num_damaged > 0 and num_good < 10 * num_damaged
        encoding = _narrow_encoding(path, sample=foreign, histogram=histogram) if damaged else "utf-8"
    licence = "Project Gutenberg License" if _GUTENBERG.search(head) else "unknown"
    return TextFile(
        path=path, name=name, sha256=digest.hexdigest(), num_bytes=num_bytes, encoding=encoding, licence=licence
    )


def _wide_encoding(head: bytes) -> str | None:
    """The encoding that a byte order mark or the place of the zeros betrays."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    zeros = np.frombuffer(head, dtype=np.uint8)[: len(head) // 2 * 2].reshape(-1, 2) == 0
    even, odd = (zeros.mean(axis=0) if len(zeros) else np.zeros(2)).tolist()
    if odd > 0.7 and even < 0.01:
        return "utf-16-le"
    if even > 0.7 and odd < 0.01:
        return "utf-16-be"
    return None


def _refuse_binary(path: Path, *, head: bytes, histogram: NDArray[np.int64]) -> None:
    hint = "give plain text (.txt, .md); unpack archives and convert documents first"
    for signature, kind in _SIGNATURES.items():
        if head.startswith(signature):
            raise DataError(f"{path} is not text but {kind}", hint=hint)
    share = histogram[_CONTROLS].sum() / max(1, histogram.sum())
    if share > MAX_CONTROL_SHARE:
        raise DataError(f"{path} is not text: {share:.0%} of its bytes are control characters", hint=hint)


def _narrow_encoding(path: Path, *, sample: bytes, histogram: NDArray[np.int64]) -> str:
    """The single-byte encoding in which the bytes above 127 are Spanish, else charset-normalizer's choice."""
    high = {byte: int(histogram[byte]) for byte in range(128, 256) if histogram[byte]}
    scores = {encoding: _spanishness(high, encoding) for encoding in _SINGLE_BYTE}
    best = max(_SINGLE_BYTE, key=lambda encoding: scores[encoding])
    is_western = sum(high.values()) <= MAX_ACCENT_SHARE * int(histogram.sum())
    if is_western and scores[best] >= 0.5 * sum(high.values()):
        only_latin1 = best == "cp1252" and not any(byte < 0xA0 for byte in high)
        return "iso-8859-1" if only_latin1 else best
    guess = from_bytes(sample).best()
    if guess is None:
        raise DataError(f"{path}: cannot tell its encoding", hint="convert it to UTF-8, for example with iconv")
    return str(guess.encoding)


def _spanishness(high: dict[int, int], encoding: str) -> float:
    """How many of these bytes read as letters of Spanish; other letters and punctuation count for less."""
    score = 0.0
    for byte, count in high.items():
        character = bytes([byte]).decode(encoding, errors="replace")
        if character in _SPANISH:
            score += count
        elif character in _ALSO:
            score += 0.5 * count
    return score
