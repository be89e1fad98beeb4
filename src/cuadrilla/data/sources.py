"""Where text comes from: local files, folders and archives, and the built-in generator of stories.

Invariants
* Nothing depends on the order in which a file system lists names or a user types arguments: sources are sorted by
  name and content. Names are relative to the folder that was given, so no path of this machine enters a manifest.
* All that is wrong is said at once. What is broken is passed over if that is asked for, each with its reason; what
  comes before the damage is kept.
* Only text is opened as text; nothing is unpickled and nothing is extracted, ever.

A new kind of file is a reader in `formats/`, a suffix in `formats/files.py` and a branch in `Sources._texts_of`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from cuadrilla.data.cuentos import stories
from cuadrilla.data.formats import records, tei
from cuadrilla.data.formats.encoding import HEAD_BYTES, decoded, detect
from cuadrilla.data.formats.files import ACCEPTED, DAMAGE, PARQUET, TAR, ZIP, Form, form_of, members, opened
from cuadrilla.data.formats.records import Reading
from cuadrilla.data.get.record import UNKNOWN, licences
from cuadrilla.data.listing import Listing, Log, TextSource
from cuadrilla.errors import ConfigError, DataError

MAX_STORIES = 10**8
STORY_BYTES = 800
"""Of a story, about."""
MAX_UNPACKED_BYTES = 20 * 10**9
"""Of text in one file that is packed, whatever in."""
AS_USUAL = Reading()
LEAVE_OUT = "repair them or leave them out; --skip-bad skips what is broken, and counts and names it"
_GUTENBERG = re.compile(rb"START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK", re.IGNORECASE)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); units are the stage's own."""


class SourceText(NamedTuple):
    """One text: a plain file, a member of an archive, a record, a body of TEI, a story."""

    pieces: Iterator[str]
    keeps_indentation: bool = False
    """Markdown gives indentation a meaning (lists, code); in plain text it is layout."""


class TextPiece(NamedTuple):
    """A part of a text, cut anywhere; of an empty text there is one."""

    source: int
    number: int
    """Of its text among all."""
    keeps_indentation: bool
    text: str


class Sources:
    """What the arguments of a preparation lead to: what is to be held out, then the others, each sorted by name."""

    def __init__(self, sources: list[TextSource], listed: Log, reading: Reading) -> None:
        times = Counter(source.name for source in sources)
        self.all = sorted(
            sources,
            key=lambda each: (not each.is_held_out, each.name, each.sha256 if times[each.name] > 1 else ""),
        )
        self.log = listed
        """What was passed over: in folders, and in files as far as they have been read."""
        self._listed = listed
        self._reading = reading
        self._licences: dict[Path, dict[str, str]] = {}

    def read(self) -> Iterator[TextPiece]:
        """Everything, in order. Raises DataError for all that is wrong, when all has been read."""
        listed = self._listed
        self.log = Log(skipped=[*listed.skipped], counts=listed.counts.copy(), broken={**listed.broken})
        number = 0
        for place, source in enumerate(self.all):
            source.num_bytes, source.encodings, source.licences = 0, set(), set()
            try:
                for text in self._texts_in(source):
                    for piece in text.pieces:
                        _grow(source, piece)
                        if not self.log.problems:
                            yield TextPiece(place, number, text.keeps_indentation, piece)
                    number += 1
            except (DataError, *DAMAGE) as error:
                problem = error if isinstance(error, DataError) else _damaged(source.path, error)
                self.log.refuse(source.name, problem, skip_bad=self._reading.skip_bad)
            if UNKNOWN in source.licences:
                recorded = self._licences.setdefault(source.path.parent, licences(source.path.parent))
                source.licences = source.licences - {UNKNOWN} | {recorded.get(source.sha256, UNKNOWN)}
        self.log.skipped.sort()
        _refuse_all(self.log.problems)

    def _texts_in(self, source: TextSource) -> Iterator[SourceText]:
        """The texts of a source. Raises DataError, what the libraries raise for damage."""
        if source.num_stories:
            _note(source, "utf-8", "CC0-1.0 (generated)")
            yield from (SourceText(iter((story,))) for story in stories(source.num_stories, seed=0))
            return
        form = form_of(source.path.name)
        assert form is not None, source.path
        before = len(self.log.broken) + len(self.log.problems)
        if form.content in (ZIP, TAR):
            for name, stream in members(source.path, form):
                yield from self._texts_of_member(name, stream, source)
        elif form.content == PARQUET:
            _note(source, "utf-8", UNKNOWN)
            cells = records.parquet(source.path, reading=self._reading, counts=self.log.counts)
            yield from (SourceText(iter((text,))) for text in cells)
        else:
            with opened(source.path, form.packing) as stream:
                yield from self._texts_of(form.content, stream, source, where=str(source.path), label=source.name)
        is_silent = len(self.log.broken) + len(self.log.problems) == before
        if source.is_given and not source.encodings and is_silent:
            hint = "accepted: {accepted}"
            raise DataError("{path} holds no text that is read", path=source.path, hint=hint, accepted=ACCEPTED)

    def _texts_of_member(self, name: str, stream: IO[bytes], source: TextSource) -> Iterator[SourceText]:
        """One that is broken says nothing about its neighbours."""
        if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
            return
        label, form = f"{source.name}!{name}", form_of(name)
        if form is None or form != Form(form.content) or form.content in (ZIP, TAR, PARQUET):
            self.log.skip(label, "files_not_text")
            return
        try:
            yield from self._texts_of(form.content, stream, source, where=f"{source.path}!{name}", label=label)
        except DataError as error:
            self.log.refuse(label, error, skip_bad=self._reading.skip_bad)

    def _texts_of(
        self, content: str, stream: IO[bytes], source: TextSource, *, where: str, label: str
    ) -> Iterator[SourceText]:
        """The texts of one stream. Raises DataError."""
        if content == ".jsonl":
            _note(source, "utf-8", UNKNOWN)
            found = records.json_lines(stream, where=where, reading=self._reading, counts=self.log.counts)
            yield from (SourceText(iter((text,))) for text in found)
        elif content == ".xml":
            novel = tei.read(stream, where=where)
            if not novel.is_tei:
                self.log.skip(label, "files_xml_not_tei")
                return
            _note(source, novel.encoding, novel.licence)
            yield from (SourceText(iter((text,))) for text in novel.texts)
        else:
            head = stream.read(HEAD_BYTES)
            encoding = detect(head, where=where)
            _note(source, encoding, "Project Gutenberg License" if _GUTENBERG.search(head[: 2**20]) else UNKNOWN)
            yield SourceText(decoded(head, stream, encoding), content == ".md")


def list_sources(
    specs: Sequence[str], *, exclude: Path, reading: Reading = AS_USUAL, held_out: Sequence[str] = ()
) -> Sources:
    """Everything that `specs` name: files, folders, archives, `cuentos:N`; nothing is read yet.

    `exclude` is a folder not to enter (the output); `held_out` are files and folders, too, among `specs` or not.
    Raises ConfigError for a malformed `cuentos:`, DataError for all that cannot be listed.
    """
    listing = Listing(exclude=exclude, skip_bad=reading.skip_bad)
    generated: dict[int, TextSource] = {}
    for spec, is_held_out in (*((spec, False) for spec in specs), *((spec, True) for spec in held_out)):
        if not spec or (spec.startswith("cuentos:") and not is_held_out):
            count = _parse_stories(spec)
            generated[count] = TextSource(name=f"cuentos:{count}", num_stories=count, size_bytes=count * STORY_BYTES)
            continue
        try:
            listing.add(Path(spec), is_held_out=is_held_out)
        except DataError as error:  # of what was typed nothing is passed over
            listing.log.problems.append(error)
    _refuse_all(listing.log.problems)
    return Sources([*listing.files.values(), *generated.values()], listing.log, reading)


def _note(source: TextSource, encoding: str, licence: str) -> None:
    source.encodings.add(encoding)
    source.licences.add(licence)


def _grow(source: TextSource, piece: str) -> None:
    source.num_bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "replace"))
    if source.num_bytes > max(MAX_UNPACKED_BYTES, 3 * source.size_bytes):
        raise DataError(
            "{path} unpacks to more than {most:,} bytes",
            path=source.path,
            most=MAX_UNPACKED_BYTES,
            hint="if you trust it, unpack it yourself and give the text in several files",
        )


def _refuse_all(problems: Sequence[DataError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DataError(
            "{files:,} files cannot be used",
            files=len(problems),
            hint=problems[0].hint if len({error.hint for error in problems}) == 1 else LEAVE_OUT,
            details=[error.message for error in problems],
        )


def _damaged(path: Path, error: Exception) -> DataError:
    reason = "".join(str(getattr(error, "strerror", None) or error).splitlines()[:1]) or type(error).__name__
    hint = "fetch it again, or leave it out"
    return DataError("{path} cannot be read: {error}", path=path, error=reason[:300], hint=hint)


def _parse_stories(spec: str) -> int:
    digits = spec.removeprefix("cuentos:")
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_STORIES:
        raise ConfigError(
            "{spec!r} does not say how many stories",
            spec=spec,
            hint="write cuentos:40000, from 1 to {most:,}",
            most=MAX_STORIES,
        )
    return int(digits)
