"""Where text comes from: local files, folders and archives, and the built-in generator of stories.

Invariants
* Nothing depends on the order in which a file system lists names or a user types arguments: sources are sorted by
  name and content. Names are relative to the folder that was given, so no path of this machine enters a manifest.
* A file is read once, in pieces: hashed, decoded and looked at for whatever is wrong with it on the way.
* All that is wrong is said at once. What is broken is passed over if bad records are, each with its reason; for that
  each file is read through before any of its text is taken.
* Only text is opened as text. Pickles, images and anything with more than one control character in a hundred bytes are
  refused; nothing is unpickled and nothing is extracted, ever.

A new kind of file is a reader in `formats/`, a suffix in `formats/form.py` and a branch in `Sources._texts_of`.
"""

import hashlib
import lzma
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

from cuadrilla.data.cuentos import stories
from cuadrilla.data.formats import jsonl, parquet, tei
from cuadrilla.data.formats.archive import ArchiveEntry, members
from cuadrilla.data.formats.encoding import HEAD_BYTES, Finding, decoded, detect
from cuadrilla.data.formats.form import ACCEPTED, PARQUET, Form, form_of
from cuadrilla.data.formats.packing import INSTALL, opened
from cuadrilla.data.formats.record import BadFileError, Reading
from cuadrilla.data.get.record import UNKNOWN, licences
from cuadrilla.data.listing import Listing, Log, TextSource
from cuadrilla.errors import ConfigError, DataError, EnvironmentProblem
from cuadrilla.messages import Message
from cuadrilla.rundir import file_sha256

MAX_STORIES = 10**8
STORY_BYTES = 800
"""Of a story, about."""
AS_USUAL = Reading()
LOOKING = Message("looking at the files")
LEAVE_OUT = "repair them or leave them out; --skip-bad skips what is broken, and counts and names it"
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError),
    *(NotImplementedError, RuntimeError, OverflowError, IndexError, MemoryError),
)
"""What the libraries raise for files that are not what they should be."""

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
            key=lambda each: (
                not each.is_held_out,
                each.name,
                file_sha256(each.path) if times[each.name] > 1 else "",
            ),
        )
        self.log = listed
        """What was passed over: in folders, and in files as far as they have been read."""
        self._listed = listed
        self._reading = reading
        self._licences: dict[Path, dict[str, str]] = {}

    @property
    def texts(self) -> list[TextSource]:
        """Those that have been read and hold text."""
        return [source for source in self.all if source.is_text]

    def read(self) -> Iterator[TextPiece]:
        """Everything, in order. Raises DataError for all that is wrong, when all has been read."""
        self.log = self._listed.copy()
        number = 0
        for place, source in enumerate(self.all):
            try:
                if self._reading.skip_bad:
                    for text in self._texts_in(source, Log()):
                        _exhaust(text)
                for text in self._texts_in(source, self.log):
                    for piece in text.pieces:
                        source.num_bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "replace"))
                        if not self.log.problems:
                            yield TextPiece(place, number, text.keeps_indentation, piece)
                    number += 1
            except (DataError, *_DAMAGE) as error:
                source.is_text = False
                problem = error if isinstance(error, DataError) else _damaged(source.path, error)
                self.log.refuse(source.name, problem, skip_bad=self._reading.skip_bad)
        self.log.skipped.sort()
        _refuse_all(self.log.problems)

    def survey(self, progress: Progress) -> None:
        """Read everything for what is known about it then. Raises DataError."""
        total = sum(source.size_bytes for source in self.all)
        progress(LOOKING, 0, total)
        for place, _ in groupby(self.read(), key=lambda piece: piece.source):
            progress(LOOKING, sum(source.size_bytes for source in self.all[:place]), total)
        progress(LOOKING, total, total)

    def _texts_in(self, source: TextSource, log: Log) -> Iterator[SourceText]:
        """The texts of a source, and then the facts about it. Raises DataError."""
        digest = hashlib.sha256()
        source.num_bytes, source.encodings, source.licences = 0, set(), set()
        num_problems = len(log.problems) + len(log.broken)
        if source.num_stories:
            for story in stories(source.num_stories, seed=0):
                digest.update(story.encode() + b"\0")
                yield SourceText(iter((story,)))
            source.encodings.add("utf-8")
            source.licences.add("CC0-1.0 (generated)")
        else:
            yield from self._texts_of_file(source, log, digest)
        source.sha256 = digest.hexdigest()
        source.is_text = bool(source.encodings)
        if not source.is_text and num_problems == len(log.problems) + len(log.broken):
            _check_wanted(source, log)
        if UNKNOWN in source.licences:
            recorded = self._licences.setdefault(source.path.parent, licences(source.path.parent))
            source.licences = source.licences - {UNKNOWN} | {recorded.get(source.sha256, UNKNOWN)}

    def _texts_of_file(self, source: TextSource, log: Log, digest: "hashlib._Hash") -> Iterator[SourceText]:
        form = form_of(source.path.name)
        assert form is not None, source.path
        if form.archive:
            for entry in members(source.path, form.archive, digest):
                label = f"{source.name}!{entry.name}"
                if entry.stream and (content := _content_of(entry, log, label=label)):
                    where = f"{source.path}!{entry.name}"
                    try:
                        yield from self._texts_of(content, entry.stream, source, log, where=where, label=label)
                    except BadFileError as error:
                        log.refuse(label, error, skip_bad=self._reading.skip_bad)
                elif not entry.stream and not _is_hidden(entry.name):
                    log.skip(label, "links_in_archives")
        elif form.content == PARQUET:
            for text in parquet.records(source.path, reading=self._reading, counts=log.counts):
                yield SourceText(iter((text,)))
            source.encodings.add("utf-8")
            source.licences.add(UNKNOWN)
            with open(source.path, "rb") as file:
                hashlib.file_digest(file, lambda: digest)
        else:
            with opened(source.path, form.packing, digest) as stream:
                yield from self._texts_of(form.content, stream, source, log, where=str(source.path), label=source.name)

    def _texts_of(
        self, content: str, stream: IO[bytes], source: TextSource, log: Log, *, where: str, label: str
    ) -> Iterator[SourceText]:
        """The texts of one stream. Raises BadFileError, DataError."""
        if content == ".jsonl":
            source.encodings.add("utf-8")
            source.licences.add(UNKNOWN)
            for text in jsonl.records(stream, where=where, reading=self._reading, counts=log.counts):
                yield SourceText(iter((text,)))
        elif content == ".xml":
            novel = tei.read(stream, where=where)
            if not novel.is_tei:
                log.skip(label, "files_xml_not_tei")
                return
            source.encodings.add(novel.encoding)
            source.licences.add(novel.licence)
            for text in novel.texts:
                yield SourceText(iter((text,)))
        else:
            head = stream.read(HEAD_BYTES)
            found = self._looked_at(detect(head, where=where, repair=self._reading.repair), log, label=label)
            source.encodings.add(found.encoding)
            source.licences.add(found.licence)
            yield SourceText(decoded(head, stream, found.encoding, where=where), content == ".md")

    def _looked_at(self, finding: Finding, log: Log, *, label: str) -> Finding:
        """Count and name what could be repaired; it will be, if that is asked for."""
        if not finding.damage:
            return finding
        log.counts["characters_encoded_twice"] += finding.num_twice
        log.counts["files_in_two_encodings"] += finding.is_mixed
        log.damaged[label] = finding.damage
        return finding.repaired() if self._reading.repair else finding


def list_sources(
    specs: Sequence[str], *, exclude: Path, reading: Reading = AS_USUAL, held_out: Sequence[str] = ()
) -> Sources:
    """Everything that `specs` name: files, folders, archives, `cuentos:N`; nothing is read yet.

    `exclude` is a folder not to enter (the output); `held_out` are files and folders, too, among `specs` or not.
    Raises ConfigError for a malformed `cuentos:`, EnvironmentProblem for a library that is not installed. What cannot
    be listed is raised by reading, with all that cannot be read.
    """
    if reading.repair and find_spec("ftfy") is None:
        raise EnvironmentProblem("repairing text needs ftfy, which is not installed", hint=INSTALL)
    listing = Listing(exclude=exclude, skip_bad=reading.skip_bad)
    counts_of_stories: set[int] = set()
    for spec, is_held_out in (*((spec, False) for spec in specs), *((spec, True) for spec in held_out)):
        if not spec:
            raise ConfigError(
                "a source is empty text", hint="give files or folders ({accepted}), or cuentos:N", accepted=ACCEPTED
            )
        if spec.startswith("cuentos:") and not is_held_out:
            counts_of_stories.add(_parse_stories(spec))
            continue
        try:
            listing.add(Path(spec), is_held_out=is_held_out)
        except DataError as error:  # of what was typed nothing is passed over
            listing.log.problems.append(error)
    generated = [
        TextSource(name=f"cuentos:{count}", num_stories=count, size_bytes=count * STORY_BYTES)
        for count in counts_of_stories
    ]
    return Sources([*listing.files.values(), *generated], listing.log, reading)


def _exhaust(text: SourceText) -> None:
    for _ in text.pieces:
        pass


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
    if isinstance(error, OSError) and error.errno is not None:
        hint = "check that the file exists and that you may read it"
        return DataError("cannot read {path}: {reason}", path=path, reason=error.strerror or error, hint=hint)
    reason = "".join(str(error).splitlines()[:1])[:300] or type(error).__name__
    hint = "fetch it again, or leave it out"
    return DataError("{path} is damaged: {reason}", path=path, reason=reason, hint=hint)


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


def _check_wanted(source: TextSource, log: Log) -> None:
    """A file from a folder may hold no text, a given one may not. Raises DataError."""
    if not source.is_given:
        return
    if source.path.suffix == ".xml":
        raise DataError("{path} is XML, but not TEI", path=source.path, hint="accepted: {accepted}", accepted=ACCEPTED)
    hint = "accepted: {accepted}"
    if log.counts["packed_in_archives"]:
        hint = "unpack it: archives and compressed files inside an archive are not read; accepted: {accepted}"
    raise DataError("{path} contains no text in an accepted format", path=source.path, hint=hint, accepted=ACCEPTED)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part.strip(".") for part in name.split("/"))


def _content_of(entry: ArchiveEntry, log: Log, *, label: str) -> str:
    """The content of a member that is to be read; one that is not is skipped: "". Hidden ones are passed over."""
    inner = form_of(entry.name)
    if _is_hidden(entry.name):
        return ""
    if inner is None:
        log.skip(label, "files_not_text")
    elif inner != Form(inner.content) or inner.content == PARQUET:
        log.skip(label, "packed_in_archives")
    else:
        return inner.content
    return ""
