"""Where text comes from: local files, folders and archives, and the built-in generator of stories.

Invariants
* Nothing depends on the order in which a file system lists names or a user types arguments: sources are sorted by
  name and content. Names are relative to the folder that was given, so no path of this machine enters a manifest.
* A file is read twice, in pieces: once to hash it, to decide its encoding from all of its bytes and to find whatever
  is wrong with it, once for its text. If the two readings differ, the file changed meanwhile and the preparation stops.
* All that is wrong is said at once. What is broken is passed over if bad records are, each with its reason.
* Only text is opened as text. Pickles, images and anything with more than one control character in a hundred bytes are
  refused; nothing is unpickled and nothing is extracted, ever.

Names: `folder/book.txt`, `corpus.zip!book.txt` for the only text of an archive, `corpus.zip!*.txt` for all its texts of
that suffix. These are one source because a tar can only be read from its front, and a zip's directory only as a whole.

A new kind of source is a frozen dataclass with the fields of `TextFile`, a member of the union `TextSource`, and a
branch in `open_sources`; a new kind of file is a reader in `formats/` and a branch in `formats/form.py`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cuadrilla.data.cuentos import stories
from cuadrilla.data.formats import parquet
from cuadrilla.data.formats.archive import members
from cuadrilla.data.formats.encoding import Finding
from cuadrilla.data.formats.form import ACCEPTED, PARQUET, Form, form_of, read_texts, survey_stream
from cuadrilla.data.formats.packing import INSTALL, Digest, chunks, unpacked
from cuadrilla.data.formats.record import BadFileError, Reading
from cuadrilla.data.formats.tar import ArchiveEntry
from cuadrilla.data.get.record import UNKNOWN
from cuadrilla.data.listing import Listed, Listing, list_path
from cuadrilla.errors import ConfigError, DataError, EnvironmentProblem
from cuadrilla.messages import Message

MAX_STORIES = 10**8
AS_USUAL = Reading()
LOOKING = Message("looking at the files")
LEAVE_OUT = "repair them or leave them out; --skip-bad skips what is broken, and counts and names it"

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); units are the stage's own."""


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One local file, surveyed: its text is decoded piece by piece and never held whole."""

    path: Path
    name: str
    sha256: str
    """Of the file as it lies on disk."""
    num_bytes: int
    """Of text, unpacked and without markup."""
    encoding: str
    licence: str
    form: Form
    reading: Reading = AS_USUAL

    @property
    def keeps_indentation(self) -> bool:
        """Markdown gives indentation a meaning (lists, code); in plain text it is layout."""
        return self.form.content == ".md"

    def texts(self) -> Iterator[Iterator[str]]:
        """Each text (of a plain file, one) as decoded pieces. Raises DataError if the file is not what was surveyed."""
        digest = hashlib.sha256()
        if self.form.content == PARQUET:
            for text in parquet.records(self.path, reading=self.reading, counts=Counter()):
                yield iter((text,))
            _exhaust(chunks(self.path, digest))
        else:
            raw = unpacked(self.path, self.form.packing, digest=digest)
            yield from read_texts(
                self.form.content, raw, where=str(self.path), encoding=self.encoding, reading=self.reading
            )
            _exhaust(raw)
        _check_unchanged(self.path, digest, self.sha256)


@dataclass(frozen=True, kw_only=True)
class TextArchive:
    """The texts of one suffix in a zip or tar, surveyed."""

    path: Path
    name: str
    sha256: str
    """Of the archive as it lies on disk."""
    num_bytes: int
    """Of text, unpacked and without markup."""
    encoding: str
    """All that occur."""
    licence: str
    form: Form
    """Its `content` is that of the members."""
    encodings: tuple[tuple[int, str], ...]
    """(place in the archive, encoding) of each member that belongs here."""
    reading: Reading = AS_USUAL

    @property
    def keeps_indentation(self) -> bool:
        """As for a file."""
        return self.form.content == ".md"

    def texts(self) -> Iterator[Iterator[str]]:
        """The texts of the members, in the archive's order. Raises DataError if it is not what was surveyed."""
        digest = hashlib.sha256()
        wanted = dict(self.encodings)
        for place, entry in enumerate(members(self.path, self.form.archive, digest=digest)):
            if place in wanted:
                yield from read_texts(
                    self.form.content,
                    entry.chunks,
                    where=f"{self.path}!{entry.name}",
                    encoding=wanted[place],
                    reading=self.reading,
                )
        _check_unchanged(self.path, digest, self.sha256)


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


TextSource = TextFile | TextArchive | Stories


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the arguments of a preparation lead to."""

    sources: tuple[TextSource, ...]
    """What is to be held out, then the others, each sorted by name and content."""
    held_out: tuple[int, ...]
    """Places in `sources`."""
    skipped: tuple[str, ...]
    """Names of files that are not text, or broken and skipped, sorted."""
    broken: Mapping[str, str]
    """Of these the broken ones, and why."""
    damaged: Mapping[str, str]
    """Texts that could be repaired, and what is wrong with them."""
    counts: Counter[str]
    """Files skipped, by reason. Hidden files are not counted: a `.DS_Store` must not change a manifest."""


def open_sources(
    specs: Sequence[str],
    *,
    exclude: Path,
    progress: Progress,
    reading: Reading = AS_USUAL,
    held_out: Sequence[str] = (),
) -> Found:
    """List, hash and survey everything that `specs` name: files, folders, archives, `cuentos:N`.

    `exclude` is a folder not to enter (the output); `held_out` are files and folders, too, among `specs` or not.
    Raises DataError for what is missing, unreadable or not text (all of it at once), ConfigError for a malformed
    `cuentos:`, EnvironmentProblem for a format whose library is not installed.
    """
    if reading.repair and find_spec("ftfy") is None:
        raise EnvironmentProblem("repairing text needs ftfy, which is not installed", hint=INSTALL)
    listing = Listing(skip_bad=reading.skip_bad)
    counts_of_stories = set()
    for spec in specs:
        if spec.startswith("cuentos:"):
            counts_of_stories.add(_parse_stories(spec))
        elif not spec:
            raise ConfigError(
                "a source is empty text", hint="give files or folders ({accepted}), or cuentos:N", accepted=ACCEPTED
            )
        else:
            _list(spec, listing, exclude=exclude, is_held_out=False)
    for spec in held_out:
        _list(spec, listing, exclude=exclude, is_held_out=True)
    files = sorted(listing.files.values())
    sizes = [file.path.stat().st_size for file in files]
    done, total = 0, sum(sizes)
    found: list[tuple[bool, TextSource]] = []
    for file, size in zip(files, sizes, strict=True):
        progress(LOOKING, done, total)
        for source in _survey_path(file, reading=reading, listing=listing):
            found.append((file.is_held_out, source))
        done += size
    if files:
        progress(LOOKING, total, total)
    _refuse_all(listing.problems)
    found += [(False, _survey_stories(count)) for count in sorted(counts_of_stories)]
    found.sort(key=lambda row: (not row[0], row[1].name, row[1].sha256))
    return Found(
        sources=tuple(source for _, source in found),
        held_out=tuple(range(sum(is_held_out for is_held_out, _ in found))),
        skipped=tuple(sorted(listing.skipped)),
        broken=listing.broken,
        damaged=listing.damaged,
        counts=listing.counts,
    )


def _list(spec: str, listing: Listing, *, exclude: Path, is_held_out: bool) -> None:
    try:
        list_path(Path(spec), listing, exclude=exclude.resolve(), is_held_out=is_held_out)
    except DataError as error:  # of what was typed nothing is passed over
        listing.problems.append(error)


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


def plain_text(path: Path) -> TextFile:
    """One file as text in whatever encoding, whatever its name. Raises DataError."""
    file = _survey_file(path, Form(".txt"), name=path.name, reading=AS_USUAL, listing=Listing())
    assert file is not None
    return file


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


def _exhaust(pieces: Iterable[bytes]) -> None:
    for _ in pieces:
        pass


def _check_unchanged(path: Path, digest: Digest, sha256: str) -> None:
    if digest.hexdigest() != sha256:
        raise DataError(
            "{path} changed while it was read", path=path, hint="wait until it is written completely, then run again"
        )


def _survey_path(listed: Listed, *, reading: Reading, listing: Listing) -> list[TextSource]:
    """The sources in one file: none if it cannot be read, which `listing` learns."""
    inside = Listing(skip_bad=listing.skip_bad, recorded=listing.recorded)
    try:
        sources = _sources_in(listed, reading=reading, listing=inside)
    except DataError as error:
        listing.refuse(listed.name, error)
        return []
    listing.add(inside)
    return sources


def _sources_in(listed: Listed, *, reading: Reading, listing: Listing) -> list[TextSource]:
    """One from a folder that holds no text is skipped, a given one is an error. Raises DataError."""
    name, path, is_given, _ = listed
    kind = form_of(path.name)
    assert kind is not None, path
    if kind.archive:
        found: list[TextSource] = list(_survey_archive(path, kind, name=name, reading=reading, listing=listing))
        why = "{path} contains no text in an accepted format"
    else:
        file = _survey_file(path, kind, name=name, reading=reading, listing=listing)
        found = [file] if file else []
        why = "{path} is XML, but not TEI"
    if not found and is_given and not (listing.problems or listing.broken):
        hint = "accepted: {accepted}"
        if listing.counts["packed_in_archives"]:
            hint = "unpack it: archives and compressed files inside an archive are not read; accepted: {accepted}"
        raise DataError(why, path=path, hint=hint, accepted=ACCEPTED)
    if not found and not kind.archive:
        listing.skip(name, "files_xml_not_tei")
    return found


def _survey_file(path: Path, kind: Form, *, name: str, reading: Reading, listing: Listing) -> TextFile | None:
    """Read a file once; None if it is XML, but not TEI. The counts of `listing` grow by the bad records in it.

    Raises DataError if it is binary, damaged or in no encoding we can tell.
    """
    digest = hashlib.sha256()
    finding: Finding | None
    if kind.content == PARQUET:
        _exhaust(chunks(path, digest))
        texts = parquet.records(path, reading=reading, counts=listing.counts)
        finding = Finding(encoding="utf-8", num_bytes=sum(len(text.encode()) for text in texts))
    else:
        raw = unpacked(path, kind.packing, digest=digest)
        finding = survey_stream(kind.content, raw, where=str(path), reading=reading, counts=listing.counts)
    if finding is None:
        return None
    finding = _looked_at(finding, reading, listing, name=name)
    return TextFile(
        path=path,
        name=name,
        sha256=digest.hexdigest(),
        num_bytes=finding.num_bytes,
        encoding=finding.encoding,
        licence=_licence([finding], recorded=listing.licence(path, digest.hexdigest())),
        form=kind,
        reading=reading,
    )


@dataclass(kw_only=True)
class _Member:
    place: int
    name: str
    finding: Finding


def _survey_archive(path: Path, kind: Form, *, name: str, reading: Reading, listing: Listing) -> Iterator[TextArchive]:
    """One source for each suffix that occurs."""
    digest = hashlib.sha256()
    groups: dict[str, list[_Member]] = {}
    for place, entry in enumerate(members(path, kind.archive, digest=digest)):
        content = _content_of(entry, listing, label=f"{name}!{entry.name}")
        if not content:
            continue
        where = f"{path}!{entry.name}"
        try:
            finding = survey_stream(content, entry.chunks, where=where, reading=reading, counts=listing.counts)
        except BadFileError as error:
            listing.refuse(f"{name}!{entry.name}", error)
            continue
        if finding is None:
            listing.skip(f"{name}!{entry.name}", "files_xml_not_tei")
        else:
            finding = _looked_at(finding, reading, listing, name=f"{name}!{entry.name}")
            groups.setdefault(content, []).append(_Member(place=place, name=entry.name, finding=finding))
    for content, group in groups.items():
        findings = [member.finding for member in group]
        yield TextArchive(
            path=path,
            name=f"{name}!{group[0].name if len(group) == 1 else '*' + content}",
            sha256=digest.hexdigest(),
            num_bytes=sum(finding.num_bytes for finding in findings),
            encoding=", ".join(sorted({finding.encoding for finding in findings})),
            licence=_licence(findings, recorded=listing.licence(path, digest.hexdigest())),
            form=Form(content, archive=kind.archive),
            encodings=tuple((member.place, member.finding.encoding) for member in group),
            reading=reading,
        )


def _looked_at(finding: Finding, reading: Reading, listing: Listing, *, name: str) -> Finding:
    """Count and name what could be repaired; it will be, if that is asked for."""
    if not finding.damage:
        return finding
    listing.counts["characters_encoded_twice"] += finding.num_twice
    listing.counts["files_in_two_encodings"] += finding.is_mixed
    listing.damaged[name] = finding.damage
    return finding.repaired() if reading.repair else finding


def _licence(findings: Iterable[Finding], *, recorded: str) -> str:
    """All that the texts say; for one that says nothing, what its download's record does."""
    said = {finding.licence for finding in findings}
    return ", ".join(sorted({recorded if each == UNKNOWN else each for each in said}))


def _content_of(entry: ArchiveEntry, listing: Listing, *, label: str) -> str:
    """The content of a member that is to be read; one that is not is skipped: "". Hidden ones are passed over."""
    if any(part.startswith(".") for part in entry.name.split("/")):
        return ""
    inner = form_of(entry.name)
    if not entry.is_regular:
        listing.skip(label, "links_in_archives")
    elif inner is None:
        listing.skip(label, "files_not_text")
    elif inner.archive or inner.packing or inner.content == PARQUET:
        listing.skip(label, "packed_in_archives")
    else:
        return inner.content
    return ""


def _survey_stories(count: int) -> Stories:
    digest = hashlib.sha256()
    num_bytes = 0
    for story in stories(count, seed=0):
        raw = story.encode() + b"\0"
        digest.update(raw)
        num_bytes += len(raw) - 1
    return Stories(count=count, name=f"cuentos:{count}", sha256=digest.hexdigest(), num_bytes=num_bytes)
