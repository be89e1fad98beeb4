"""Which files the arguments of a preparation name: files as given, folders walked.

Hidden files and folders, the record of a download, links to folders (they can loop) and the output are passed over; so
is what tells about a corpus (a README, a licence), unless it is given by name. Files that are not text by their suffix
are skipped in a folder and refused when given by name. What cannot be read is collected, so that all of it can be said
at once.
"""

import difflib
import os
import re
import stat
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cuadrilla.data.formats.form import ACCEPTED, Form, form_of
from cuadrilla.data.get.record import RECORD, UNKNOWN
from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

BROKEN = "files_broken"
_ABOUT = re.compile("(readme|licen[cs]e|copying|changelog|authors|contributing|notice)([._-].*)?", re.IGNORECASE)
_PLAIN = (Form(".txt"), Form(".md"))
_PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".npy", ".npz")


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
    is_text: bool = False
    """It could be read, and holds text in an accepted format."""
    sha256: str = ""
    """Of the file as it lies on disk."""
    num_bytes: int = 0
    """Of text, unpacked and without markup."""
    encodings: set[str] = field(default_factory=set)
    licences: set[str] = field(default_factory=set)
    """What the texts themselves say, and for what they do not say the record of the download."""

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
    damaged: dict[str, str] = field(default_factory=dict)
    """Names of texts that could be repaired, and what is wrong with them."""

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

    def copy(self) -> "Log":
        return Log(
            skipped=[*self.skipped],
            counts=self.counts.copy(),
            problems=[*self.problems],
            broken={**self.broken},
            damaged={**self.damaged},
        )


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
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            raise DataError(
                "cannot read {path}: {reason}",
                path=path,
                reason=getattr(error, "strerror", None) or error,
                hint=_nearby(path),
            ) from error
        if stat.S_ISDIR(mode):
            self._add_folder(path, is_held_out=is_held_out)
        elif not stat.S_ISREG(mode):
            raise DataError(
                "{path} is not a regular file", path=path, hint="give a file or a folder: {accepted}", accepted=ACCEPTED
            )
        else:
            _check_suffix(path)
            self._add_file(_portable(path.name), path, is_given=True, is_held_out=is_held_out)

    def _add_folder(self, folder: Path, *, is_held_out: bool) -> None:
        top = _portable(folder.resolve().name)

        def label(path: Path) -> str:
            return "/".join((top, *map(_portable, path.relative_to(folder).parts)))

        def refuse(error: OSError) -> None:
            cause = DataError(
                "cannot list {path}: {reason}",
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
            self.log.counts["files_given_twice"] += is_held_out == other.is_held_out
            name = min(name, other.name, key=lambda label: (-label.count("/"), label))
            is_given, is_held_out = is_given or other.is_given, is_held_out or other.is_held_out
        self.files[key] = TextSource(
            name=name, path=path, is_given=is_given, is_held_out=is_held_out, size_bytes=status.st_size
        )


def _nearby(path: Path) -> str:
    """A hint that names a file spelled almost like `path`."""
    try:
        names = sorted(entry.name for entry in os.scandir(path.parent))
    except (OSError, ValueError):
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    if close:
        return Message("did you mean {close}?", close=path.parent / close[0])
    return Message("give files or folders ({accepted}), or cuentos:N", accepted=ACCEPTED)


def _check_suffix(path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix in _PICKLE_SUFFIXES:
        raise DataError(
            "{path} is not text: a {suffix} file can be a pickle, which runs code when opened",
            path=path,
            suffix=suffix,
            hint="give the text it was made from, as .txt or .md",
        )
    if form_of(path.name) is None:
        raise DataError(
            "{path}: {suffix} is not read as text" if suffix else "{path}: a file without suffix is not read as text",
            path=path,
            suffix=suffix,
            hint="if it is plain text, rename it to .txt; accepted: {accepted}",
            accepted=ACCEPTED,
        )


def _portable(name: str) -> str:
    """The same name on every machine: macOS decomposes letters, and Linux allows bytes that are not UTF-8.

    It is shown wherever a run's data are: controls would break lines, and reach terminals.
    """
    return unicodedata.normalize("NFC", one_line(os.fsencode(name).decode("utf-8", errors="replace")))
