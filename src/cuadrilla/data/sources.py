"""Where text comes from: local files and folders, and the built-in generator of stories.

Invariants
* The result does not depend on the order of arguments or of names in a file system: sources are sorted by name and
  content. Names are relative to the given folder, so no path of this machine enters a manifest.
* In a folder these are passed over: hidden files and folders, the record of a download, links to folders (they can
  loop), the output, and files about the corpus (a README, a licence). A file whose suffix is not one of text is skipped
  in a folder, and refused as an argument. A damaged file is an error; a record without text is counted.
* Only text is opened as text; nothing is ever unpickled. Archives are not read.

A new kind of file needs a reader in `formats/`, a suffix in `formats/files.py`, a branch in `Sources._contents`.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cuadrilla.data.cuentos import stories
from cuadrilla.data.formats import records, tei
from cuadrilla.data.formats.encoding import HEAD_BYTES, UTF8, decoded, detect
from cuadrilla.data.formats.files import ACCEPTED, ARCHIVE, DAMAGE, OPENERS, PARQUET, Form, form_of
from cuadrilla.data.record import RECORD, UNKNOWN, read_record
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.printable import one_line
from cuadrilla.rundir import file_sha256

MAX_STORIES = 10**8
STORY_BYTES = 800
"""Approximate size of a story."""
MAX_UNPACKED_BYTES = 20 * 10**9
"""Maximum size of the text in one file; three times the file's size on disk, if that is more."""
DEFAULT_FIELD = "text"
_ABOUT = re.compile("(readme|licen[cs]e|copying|changelog|authors|contributing|notice)([._-].*)?", re.IGNORECASE)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total). Each stage has its own unit."""


class SourceText(NamedTuple):
    """One text: a plain file, a record, a TEI `<body>` or a story."""

    source: int
    pieces: Iterator[str]
    """Cut anywhere. They must be read to their end before the next text is asked for."""


@dataclass(kw_only=True)
class TextSource:
    """A file to read, or the first `num_stories` stories of the built-in generator."""

    name: str
    path: Path = Path()
    num_stories: int = 0
    size_bytes: int
    """Size on disk; an estimate for stories."""

    # Known once the source has been read.
    num_bytes: int = 0
    """Size of the text, unpacked and without markup."""
    encoding: str = UTF8

    @cached_property
    def sha256(self) -> str:
        """Hash of the file on disk; for stories, of their number and the first 100. Raises DataError."""
        if self.num_stories:
            some = "\0".join(stories(min(100, self.num_stories), seed=0))
            return hashlib.sha256(f"{self.num_stories}\0{some}".encode()).hexdigest()
        with _damage_named(self.path):
            return file_sha256(self.path)

    @cached_property
    def licence(self) -> str:
        """The licence in the record of its download, if this is the file that was downloaded; else `UNKNOWN`."""
        if self.num_stories:
            return "CC0-1.0 (generated)"
        with suppress(DataError):
            if (record := read_record(self.path.parent)) and self.sha256 in record.files.values():
                return record.licence
        return UNKNOWN


class Sources:
    """The sources that a preparation's arguments name, sorted by name."""

    def __init__(self, sources: list[TextSource], *, skipped: list[tuple[str, str]], field: str) -> None:
        self.all = sorted(sources, key=lambda each: (each.name, each.sha256))
        self._listed, self._field = sorted(skipped), field
        self.skipped: list[str] = []
        """Names of the files in folders that are not text, and of those that were read and are XML other than TEI."""
        self.counts: Counter[str] = Counter()
        """Number of skipped files and of records without text, by reason. Hidden files are not counted, because a
        `.DS_Store` must not change a manifest."""

    def texts(self) -> Iterator[SourceText]:
        """All texts, in order. Raises DataError, also while pieces are read."""
        self.skipped, self.counts = [name for name, _ in self._listed], Counter(reason for _, reason in self._listed)
        for place, source in enumerate(self.all):
            source.num_bytes = 0
            with _damage_named(source.path):
                for pieces in self._contents(source):
                    yield SourceText(place, _measured(source, pieces))

    def _contents(self, source: TextSource) -> Iterator[Iterable[str]]:
        """The pieces of each text of a source. Raises DataError, and whatever libraries raise for damaged files."""
        where, form = str(source.path), form_of(source.path.name)
        if source.num_stories:
            yield from _whole(stories(source.num_stories, seed=0))
            return
        assert form is not None
        if form.content == PARQUET:
            yield from _whole(records.parquet(source.path, field=self._field, counts=self.counts))
            return
        with OPENERS[form.packing](source.path) as stream:
            if form.content == ".jsonl":
                yield from _whole(records.json_lines(stream, where=where, field=self._field, counts=self.counts))
            elif form.content == ".xml":
                if (novel := tei.read(stream, where=where)) is None:
                    self.skipped.append(source.name)
                    self.counts["files_xml_not_tei"] += 1
                source.encoding, texts = novel or ("", [])
                yield from _whole(texts)
            else:
                head = stream.read(HEAD_BYTES)
                source.encoding = detect(head, where=where)
                yield decoded(head, stream, source.encoding)


def _whole(texts: Iterable[str]) -> Iterator[Iterable[str]]:
    return ((text,) for text in texts)


def _measured(source: TextSource, pieces: Iterable[str]) -> Iterator[str]:
    """The same pieces; their bytes are counted. Raises DataError."""
    with _damage_named(source.path):
        for piece in pieces:
            source.num_bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "replace"))
            if source.num_bytes > max(MAX_UNPACKED_BYTES, 3 * source.size_bytes):
                raise DataError(
                    "{path} unpacks to more than {most:,} bytes",
                    path=source.path,
                    most=MAX_UNPACKED_BYTES,
                    hint="if you trust it, unpack it yourself and give the text in several files",
                )
            yield piece


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn whatever libraries raise for a damaged file into a DataError that names it."""
    try:
        yield
    except DAMAGE as error:
        reason = "".join(str(getattr(error, "strerror", None) or error).splitlines()[:1]) or type(error).__name__
        hint = "repair it or leave it out"
        raise DataError("{path} cannot be read: {error}", path=path, error=reason[:300], hint=hint) from error


def list_sources(specs: Sequence[str], *, exclude: Path, field: str = DEFAULT_FIELD) -> Sources:
    """The sources that `specs` name: files, folders, `cuentos:N`. Their text is not read yet.

    `exclude` is a folder that is not entered (the output). `field` is the field of a record that holds its text.
    A file that is named twice is read once. Raises ConfigError for a malformed `cuentos:`, DataError.
    """
    skipped: list[tuple[str, str]] = []
    found: dict[object, TextSource] = {}
    for spec in specs:
        if not spec or spec.startswith("cuentos:"):
            count = _parse_stories(spec)
            found[count] = TextSource(name=f"cuentos:{count}", num_stories=count, size_bytes=count * STORY_BYTES)
            continue
        for name, path in _named(Path(spec), exclude.resolve(), skipped):
            status = path.stat()
            source = TextSource(name=name, path=path, size_bytes=status.st_size)
            if other := found.get((status.st_dev, status.st_ino)):
                source.name = min(name, other.name, key=lambda label: (-label.count("/"), label))
            found[status.st_dev, status.st_ino] = source
    return Sources([*found.values()], skipped=skipped, field=field)


def _named(path: Path, exclude: Path, skipped: list[tuple[str, str]]) -> Iterator[tuple[str, Path]]:
    """(name, path) of a file, or of each text below a folder."""
    hint = "give files or folders ({accepted}), or cuentos:N; plain text may be renamed to .txt"
    try:
        path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        why = "cannot read {path}: {reason}"
        raise DataError(why, path=path, reason=reason, hint=hint, accepted=ACCEPTED) from error
    if path.is_dir():
        yield from _walk(path, exclude, skipped)
    elif path.is_file() and form_of(path.name):
        yield _portable(path.name), path
    elif ARCHIVE.search(path.name):
        unpack = "unpack it first (unzip {path} -d FOLDER, or tar xf {path} -C FOLDER), and give the folder"
        raise DataError("{path} is an archive", path=path, hint=unpack)
    else:
        raise DataError("{path} is not read as text", path=path, hint=hint, accepted=ACCEPTED)


def _walk(folder: Path, exclude: Path, skipped: list[tuple[str, str]]) -> Iterator[tuple[str, Path]]:
    """(name, path) of each text below a folder."""
    top = _portable(folder.resolve().name)

    def refuse(error: OSError) -> None:
        with _damage_named(Path(error.filename)):
            raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        here = Path(parent)
        folders[:] = [name for name in folders if not name.startswith(".") and (here / name).resolve() != exclude]
        for name in names:
            path = here / name
            label = "/".join((top, *map(_portable, path.relative_to(folder).parts)))
            form = form_of(name)
            if name.startswith(".") or name == RECORD:
                continue
            if form == Form(".txt") and _ABOUT.fullmatch(name):
                skipped.append((label, "files_about_the_corpus"))
            elif form is not None and path.is_file():
                yield label, path
            else:
                skipped.append((label, "files_not_text"))


def _portable(name: str) -> str:
    """The same name on every machine: macOS decomposes letters, and Linux allows bytes that are not UTF-8.

    Control characters are written as numbers: the name is shown with a run's data, in terminals, too.
    """
    return unicodedata.normalize("NFC", one_line(os.fsencode(name).decode("utf-8", errors="replace")))


def _parse_stories(spec: str) -> int:
    digits = spec.removeprefix("cuentos:")
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_STORIES:
        hint = "write cuentos:40000, from 1 to {most:,}"
        raise ConfigError("{spec!r} does not say how many stories", spec=spec, hint=hint, most=MAX_STORIES)
    return int(digits)
