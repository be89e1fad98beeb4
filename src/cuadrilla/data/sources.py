"""Where text comes from: local files, folders and archives, and the built-in generator of stories.

Invariants
* Nothing depends on the order in which a file system lists names or a user types arguments: sources are sorted by
  name and content. Names are relative to the folder that was given, so no path of this machine enters a manifest.
* In a folder, hidden files and folders, the record of a download, links to folders (they can loop) and the output are
  passed over, and so is what tells about a corpus (a README, a licence). What is no text by its suffix is skipped there
  and refused when given by name. A file that is broken is an error; a record without text is counted.
* Only text is opened as text; nothing is unpickled and nothing is extracted, ever.

A new kind of file is a reader in `formats/`, a suffix in `formats/files.py` and a branch in `Sources._texts_of`.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

from cuadrilla.data.cuentos import stories
from cuadrilla.data.formats import records, tei
from cuadrilla.data.formats.encoding import HEAD_BYTES, decoded, detect
from cuadrilla.data.formats.files import ACCEPTED, DAMAGE, PARQUET, TAR, ZIP, Form, form_of, members, opened
from cuadrilla.data.record import RECORD, UNKNOWN, licences
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.printable import one_line
from cuadrilla.rundir import file_sha256

MAX_STORIES = 10**8
STORY_BYTES = 800
"""A story has about so many."""
MAX_UNPACKED_BYTES = 20 * 10**9
"""Text in one file that is packed, whatever in."""
DEFAULT_FIELD = "text"
_GUTENBERG = re.compile(rb"START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK", re.IGNORECASE)
_ABOUT = re.compile("(readme|licen[cs]e|copying|changelog|authors|contributing|notice)([._-].*)?", re.IGNORECASE)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); units are the stage's own."""
Text = tuple[Iterator[str], bool]
"""A plain file, a member of an archive, a record, a body of TEI or a story, in pieces, and whether indentation has a
meaning: in Markdown (lists, code); in plain text it is layout."""


class TextPiece(NamedTuple):
    """A part of a text, cut anywhere; of an empty text there is one."""

    source: int
    number: int
    """Its text's place among all."""
    keeps_indentation: bool
    text: str


@dataclass(kw_only=True)
class TextSource:
    """A file to read, or the first `num_stories` stories of the built-in generator."""

    name: str
    path: Path = Path()
    num_stories: int = 0
    is_held_out: bool = False
    """To be new to the model."""
    size_bytes: int
    """On disk; of stories about."""

    # Known when it has been read.
    num_bytes: int = 0
    """Size of the text, unpacked and without markup."""
    encodings: set[str] = field(default_factory=set)
    licences: set[str] = field(default_factory=set)
    """What the texts themselves say, and for what they do not say the record of the download."""

    @cached_property
    def sha256(self) -> str:
        """Hash of the file as it lies on disk; for stories that of some. Raises DataError."""
        if self.num_stories:
            some = "\0".join(stories(min(100, self.num_stories), seed=0))
            return hashlib.sha256(f"{self.num_stories}\0{some}".encode()).hexdigest()
        try:
            return file_sha256(self.path)
        except OSError as error:
            raise _damaged(self.path, error) from error

    @property
    def encoding(self) -> str:
        """All that occur."""
        return ", ".join(sorted(self.encodings))

    @property
    def licence(self) -> str:
        """All that are said."""
        return ", ".join(sorted(self.licences)) or UNKNOWN

    def note(self, encoding: str, licence: str) -> None:
        self.encodings.add(encoding)
        self.licences.add(licence)


class Sources:
    """What the arguments of a preparation lead to: what is to be held out, then the others, each sorted by name."""

    def __init__(self, sources: list[TextSource], *, skipped: list[tuple[str, str]], field: str) -> None:
        self.all = sorted(sources, key=lambda each: (not each.is_held_out, each.name, each.sha256))
        self._listed = self._skipped = skipped
        self._field = field
        self._records: Counter[str] = Counter()

    @property
    def skipped(self) -> list[str]:
        """Names of what is no text: in folders, and in archives as far as they have been read."""
        return sorted(name for name, _ in self._skipped)

    @property
    def counts(self) -> Counter[str]:
        """How many files were skipped and records had no text, by reason. Hidden files do not count: a `.DS_Store` must
        not change a manifest."""
        return Counter(reason for _, reason in self._skipped) + self._records

    def read(self) -> Iterator[TextPiece]:
        """Everything, in order. Raises DataError."""
        self._skipped, self._records = [*self._listed], Counter()
        number = -1
        for place, source in enumerate(self.all):
            source.num_bytes, source.encodings, source.licences = 0, set(), set()
            try:
                for pieces, keeps_indentation in self._texts_in(source):
                    number += 1
                    for piece in pieces:
                        _grow(source, piece)
                        yield TextPiece(place, number, keeps_indentation, piece)
            except DAMAGE as error:
                raise _damaged(source.path, error) from error
            if UNKNOWN in source.licences:
                recorded = licences(source.path.parent).get(source.sha256, UNKNOWN)
                source.licences = source.licences - {UNKNOWN} | {recorded}

    def _texts_in(self, source: TextSource) -> Iterator[Text]:
        """The texts of a source. Raises DataError, what the libraries raise for damage."""
        if source.num_stories:
            source.note("utf-8", "CC0-1.0 (generated)")
            yield from _whole(stories(source.num_stories, seed=0))
            return
        form = form_of(source.path.name)
        assert form is not None, source.path
        if form.content in (ZIP, TAR):
            for name, stream in members(source.path, form):
                yield from self._texts_of_member(name, stream, source)
        elif form.content == PARQUET:
            source.note("utf-8", UNKNOWN)
            yield from _whole(records.parquet(source.path, field=self._field, counts=self._records))
        else:
            with opened(source.path, form.packing) as stream:
                yield from self._texts_of(form.content, stream, source, where=str(source.path), label=source.name)

    def _texts_of_member(self, name: str, stream: IO[bytes], source: TextSource) -> Iterator[Text]:
        if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
            return
        label, form = f"{source.name}!{name}", form_of(name)
        if form is None or form.packing or form.content in (ZIP, TAR, PARQUET):
            self._skipped.append((label, "files_not_text"))
        else:
            yield from self._texts_of(form.content, stream, source, where=f"{source.path}!{name}", label=label)

    def _texts_of(
        self, content: str, stream: IO[bytes], source: TextSource, *, where: str, label: str
    ) -> Iterator[Text]:
        """The texts of one stream. Raises DataError."""
        if content == ".jsonl":
            source.note("utf-8", UNKNOWN)
            yield from _whole(records.json_lines(stream, where=where, field=self._field, counts=self._records))
        elif content == ".xml":
            novel = tei.read(stream, where=where)
            if not novel.is_tei:
                self._skipped.append((label, "files_xml_not_tei"))
                return
            source.note(novel.encoding, novel.licence)
            yield from _whole(novel.texts)
        else:
            head = stream.read(HEAD_BYTES)
            encoding = detect(head, where=where)
            source.note(encoding, "Project Gutenberg License" if _GUTENBERG.search(head[: 2**20]) else UNKNOWN)
            yield decoded(head, stream, encoding), content == ".md"


def _whole(texts: Iterable[str]) -> Iterator[Text]:
    return ((iter((text,)), False) for text in texts)


def list_sources(
    specs: Sequence[str], *, exclude: Path, field: str = DEFAULT_FIELD, held_out: Sequence[str] = ()
) -> Sources:
    """Everything that `specs` name: files, folders, archives, `cuentos:N`; nothing is read yet.

    `exclude` is a folder not to enter (the output); `field` the one of a record that holds its text; `held_out` are
    files and folders, too, among `specs` or not. A file that is named twice is read once. Raises ConfigError for a
    malformed `cuentos:`, DataError.
    """
    skipped: list[tuple[str, str]] = []
    found: dict[object, TextSource] = {}
    for spec, is_held_out in (*((spec, False) for spec in specs), *((spec, True) for spec in held_out)):
        if not spec or (spec.startswith("cuentos:") and not is_held_out):
            count = _parse_stories(spec)
            found[count] = TextSource(name=f"cuentos:{count}", num_stories=count, size_bytes=count * STORY_BYTES)
            continue
        for name, path in _named(Path(spec), exclude.resolve(), skipped):
            status = path.stat()
            source = TextSource(name=name, path=path, is_held_out=is_held_out, size_bytes=status.st_size)
            if other := found.get((status.st_dev, status.st_ino)):
                source.name = min(name, other.name, key=lambda label: (-label.count("/"), label))
                source.is_held_out |= other.is_held_out
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
    else:
        raise DataError("{path} is not read as text", path=path, hint=hint, accepted=ACCEPTED)


def _walk(folder: Path, exclude: Path, skipped: list[tuple[str, str]]) -> Iterator[tuple[str, Path]]:
    """(name, path) of each text below a folder."""
    top = _portable(folder.resolve().name)

    def refuse(error: OSError) -> None:
        raise _damaged(Path(error.filename), error)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        here = Path(parent)
        folders[:] = [name for name in folders if not name.startswith(".") and (here / name).resolve() != exclude]
        for name in names:
            path = here / name
            label = "/".join((top, *map(_portable, path.relative_to(folder).parts)))
            form = form_of(name)
            if name.startswith(".") or name == RECORD:
                continue
            if form in (Form(".txt"), Form(".md")) and _ABOUT.fullmatch(name):
                skipped.append((label, "files_about_the_corpus"))
            elif form is not None and path.is_file():
                yield label, path
            else:
                skipped.append((label, "files_not_text"))


def _portable(name: str) -> str:
    """The same name on every machine: macOS decomposes letters, and Linux allows bytes that are not UTF-8.

    It is shown wherever a run's data are: controls would break lines, and reach terminals.
    """
    return unicodedata.normalize("NFC", one_line(os.fsencode(name).decode("utf-8", errors="replace")))


def _grow(source: TextSource, piece: str) -> None:
    source.num_bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "replace"))
    if source.num_bytes > max(MAX_UNPACKED_BYTES, 3 * source.size_bytes):
        raise DataError(
            "{path} unpacks to more than {most:,} bytes",
            path=source.path,
            most=MAX_UNPACKED_BYTES,
            hint="if you trust it, unpack it yourself and give the text in several files",
        )


def _damaged(path: Path, error: Exception) -> DataError:
    reason = "".join(str(getattr(error, "strerror", None) or error).splitlines()[:1]) or type(error).__name__
    hint = "repair it or leave it out"
    return DataError("{path} cannot be read: {error}", path=path, error=reason[:300], hint=hint)


def _parse_stories(spec: str) -> int:
    digits = spec.removeprefix("cuentos:")
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_STORIES:
        hint = "write cuentos:40000, from 1 to {most:,}"
        raise ConfigError("{spec!r} does not say how many stories", spec=spec, hint=hint, most=MAX_STORIES)
    return int(digits)
