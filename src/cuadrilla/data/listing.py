"""Which files the arguments of a preparation name: files as given, folders walked.

Hidden files and folders, the record of a download, links to folders (they can loop) and the output are passed over; so
is what tells about a corpus (a README, a licence), unless it is given by name. Files that are not text by their suffix
are skipped in a folder and refused when given by name. What cannot be read is collected, so that all of it can be said
at once.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cuadrilla.data.cuentos import stories
from cuadrilla.data.formats.files import ACCEPTED, Form, form_of
from cuadrilla.data.get.record import RECORD, UNKNOWN
from cuadrilla.errors import DataError
from cuadrilla.printable import one_line
from cuadrilla.rundir import file_sha256

BROKEN = "files_broken"
_ABOUT = re.compile("(readme|licen[cs]e|copying|changelog|authors|contributing|notice)([._-].*)?", re.IGNORECASE)
_PLAIN = (Form(".txt"), Form(".md"))


@dataclass(kw_only=True)
class TextSource:
    """A file to read, or the first `num_stories` stories of the built-in generator."""

    name: str
    path: Path = Path()
    num_stories: int = 0
    is_given: bool = True
    """Named itself, and not only by its folder: that it holds no text is an error then."""
    is_held_out: bool = False
    """To be new to the model."""
    size_bytes: int
    """On disk; of stories about."""

    # Known when it has been read.
    num_bytes: int = 0
    """Of text, unpacked and without markup."""
    encodings: set[str] = field(default_factory=set)
    """None: it holds no text in an accepted format."""
    licences: set[str] = field(default_factory=set)
    """What the texts themselves say, and for what they do not say the record of the download."""

    @cached_property
    def sha256(self) -> str:
        """Of the file as it lies on disk ("": it cannot be read); of stories that of some."""
        if self.num_stories:
            some = "\0".join(stories(min(100, self.num_stories), seed=0))
            return hashlib.sha256(f"{self.num_stories}\0{some}".encode()).hexdigest()
        try:
            return file_sha256(self.path)
        except OSError:
            return ""

    @property
    def encoding(self) -> str:
        """All that occur."""
        return ", ".join(sorted(self.encodings))

    @property
    def licence(self) -> str:
        """All that are said."""
        return ", ".join(sorted(self.licences)) or UNKNOWN


@dataclass(kw_only=True)
class Log:
    """What was passed over, and why."""

    skipped: list[str] = field(default_factory=list)
    """Names of files that are not text, or broken."""
    counts: Counter[str] = field(default_factory=Counter)
    """Files skipped and records without text, by reason. Hidden files do not count: a `.DS_Store` must not change a
    manifest."""
    problems: list[DataError] = field(default_factory=list)
    """What stops the preparation."""
    broken: dict[str, str] = field(default_factory=dict)
    """Names of what was skipped because it is broken, and why."""

    def skip(self, name: str, reason: str) -> None:
        """Note that `name` is not read."""
        self.counts[reason] += 1
        self.skipped.append(name)

    def refuse(self, name: str, error: DataError, *, skip_bad: bool) -> None:
        """Note that `name` cannot be read: a problem, or one more that is passed over."""
        if not skip_bad:
            # Not the error itself: its traceback holds whatever was open when it was raised.
            self.problems.append(DataError(error.message, hint=error.hint))
            return
        self.skip(name, BROKEN)
        self.broken[name] = error.message


class Listing:
    """The files found so far: by device and inode, so that a file given twice is read once."""

    def __init__(self, *, exclude: Path, skip_bad: bool) -> None:
        """`exclude`: a folder not to enter."""
        self.files: dict[tuple[int, int], TextSource] = {}
        self.log = Log()
        self._exclude = exclude.resolve()
        self._skip_bad = skip_bad

    def add(self, path: Path, *, is_held_out: bool) -> None:
        """What `path` names: a file, or all below a folder. Raises DataError."""
        try:
            path.stat()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            hint = "give files or folders ({accepted}), or cuentos:N"
            raise DataError(
                "cannot read {path}: {reason}", path=path, reason=reason, hint=hint, accepted=ACCEPTED
            ) from error
        if path.is_dir():
            self._add_folder(path, is_held_out=is_held_out)
        elif not path.is_file() or form_of(path.name) is None:
            raise DataError(
                "{path} is not read as text",
                path=path,
                hint="if it is plain text, rename it to .txt; accepted: {accepted}",
                accepted=ACCEPTED,
            )
        else:
            self._add_file(_portable(path.name), path, is_given=True, is_held_out=is_held_out)

    def _add_folder(self, folder: Path, *, is_held_out: bool) -> None:
        top = _portable(folder.resolve().name)

        def label(path: Path) -> str:
            return "/".join((top, *map(_portable, path.relative_to(folder).parts)))

        def refuse(error: OSError) -> None:
            cause = DataError(
                "cannot read {path}: {reason}",
                path=error.filename,
                reason=error.strerror,
                hint="give yourself permission to read it",
            )
            self.log.refuse(label(Path(error.filename)), cause, skip_bad=self._skip_bad)

        for parent, folders, names in os.walk(folder, onerror=refuse):
            here = Path(parent)
            folders[:] = [
                name for name in folders if not name.startswith(".") and (here / name).resolve() != self._exclude
            ]
            for name in names:
                path = here / name
                if name.startswith(".") or name == RECORD:
                    continue
                if form_of(name) in _PLAIN and _ABOUT.fullmatch(name):
                    self.log.skip(label(path), "files_about_the_corpus")
                elif form_of(name) is not None and path.is_file():
                    self._add_file(label(path), path, is_given=False, is_held_out=is_held_out)
                else:
                    self.log.skip(label(path), "files_not_text")

    def _add_file(self, name: str, path: Path, *, is_given: bool, is_held_out: bool) -> None:
        status = path.stat()
        key = (status.st_dev, status.st_ino)
        if other := self.files.get(key):
            name = min(name, other.name, key=lambda label: (-label.count("/"), label))
            is_given, is_held_out = is_given or other.is_given, is_held_out or other.is_held_out
        self.files[key] = TextSource(
            name=name, path=path, is_given=is_given, is_held_out=is_held_out, size_bytes=status.st_size
        )


def _portable(name: str) -> str:
    """The same name on every machine: macOS decomposes letters, and Linux allows bytes that are not UTF-8.

    It is shown wherever a run's data are: controls would break lines, and reach terminals.
    """
    return unicodedata.normalize("NFC", one_line(os.fsencode(name).decode("utf-8", errors="replace")))
