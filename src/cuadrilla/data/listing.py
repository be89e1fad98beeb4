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
from typing import NamedTuple

from cuadrilla.data.formats.form import ACCEPTED, Form, form_of
from cuadrilla.data.get.origin import RECORD
from cuadrilla.data.get.record import UNKNOWN, licences
from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

BROKEN = "files_broken"
_ABOUT = re.compile("(readme|licen[cs]e|copying|changelog|authors|contributing|notice)([._-].*)?", re.IGNORECASE)
_PLAIN = (Form(".txt"), Form(".md"))
_PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".npy", ".npz")


class Listed(NamedTuple):
    """A file to read."""

    name: str
    path: Path
    is_given: bool
    """Named itself, and not only by its folder: that it holds no text is an error then."""
    is_held_out: bool = False
    """To be new to the model."""


@dataclass(kw_only=True)
class Listing:
    """What was found, and what was passed over and why."""

    skip_bad: bool = False
    """Pass over what is broken, instead of noting a problem."""
    files: dict[tuple[int, int], Listed] = field(default_factory=dict)
    """By device and inode, so that a file given twice is read once."""
    skipped: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    recorded: dict[Path, dict[str, str]] = field(default_factory=dict)
    """Licences by folder and SHA-256, as far as they were asked for."""

    problems: list[DataError] = field(default_factory=list)
    """What stops the preparation."""
    broken: dict[str, str] = field(default_factory=dict)
    """Names of what was passed over because it is broken, and why."""

    damaged: dict[str, str] = field(default_factory=dict)
    """Names of texts that could be repaired, and what is wrong with them."""

    def skip(self, name: str, reason: str) -> None:
        """Note that `name` is not read."""
        self.counts[reason] += 1
        self.skipped.append(name)

    def refuse(self, name: str, error: DataError) -> None:
        """Note that `name` cannot be read: a problem, or one more that is passed over."""
        if not self.skip_bad:
            # Not the error itself: its traceback holds whatever was open when it was raised.
            self.problems.append(DataError(error.message, hint=error.hint))
            return
        self.skip(name, BROKEN)
        self.broken[name] = error.message

    def add(self, inside: "Listing") -> None:
        """Learn what was passed over in one file."""
        self.skipped += inside.skipped
        self.counts += inside.counts
        self.problems += inside.problems
        self.broken |= inside.broken
        self.damaged |= inside.damaged

    def licence(self, path: Path, sha256: str) -> str:
        """What the record of a download beside `path` says about a file of that content."""
        if path.parent not in self.recorded:
            self.recorded[path.parent] = licences(path.parent)
        return self.recorded[path.parent].get(sha256, UNKNOWN)


def list_path(path: Path, listing: Listing, *, exclude: Path, is_held_out: bool = False) -> None:
    """Add what `path` names to `listing`, without entering the folder `exclude`. Raises DataError."""
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
        _list_folder(path, listing, exclude=exclude, is_held_out=is_held_out)
    elif not stat.S_ISREG(mode):
        raise DataError(
            "{path} is not a regular file", path=path, hint="give a file or a folder: {accepted}", accepted=ACCEPTED
        )
    else:
        _check_suffix(path)
        _add(Listed(_portable(path.name), path, is_given=True, is_held_out=is_held_out), listing)


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


def _list_folder(folder: Path, listing: Listing, *, exclude: Path, is_held_out: bool) -> None:
    top = _portable(folder.resolve().name)

    def refuse(error: OSError) -> None:
        cause = DataError(
            "cannot list {path}: {reason}",
            path=error.filename,
            reason=error.strerror,
            hint="give yourself permission to read it",
        )
        inner = Path(error.filename).relative_to(folder)
        listing.refuse("/".join((top, *map(_portable, inner.parts))), cause)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        here = Path(parent)
        folders[:] = [name for name in folders if not name.startswith(".") and (here / name).resolve() != exclude]
        for name in names:
            if name.startswith(".") or name == RECORD:
                continue
            path = here / name
            label = "/".join((top, *(_portable(part) for part in path.relative_to(folder).parts)))
            if form_of(name) in _PLAIN and _ABOUT.fullmatch(name):
                listing.skip(label, "files_about_the_corpus")
            elif form_of(name) is not None and path.is_file():
                _add(Listed(label, path, is_given=False, is_held_out=is_held_out), listing)
            else:
                listing.skip(label, "files_not_text")


def _portable(name: str) -> str:
    """The same name on every machine: macOS decomposes letters, and Linux allows bytes that are not UTF-8.

    It is shown wherever a run's data are: controls would break lines, and reach terminals.
    """
    return unicodedata.normalize("NFC", one_line(os.fsencode(name).decode("utf-8", errors="replace")))


def _add(file: Listed, listing: Listing) -> None:
    status = file.path.stat()
    key = (status.st_dev, status.st_ino)
    if other := listing.files.get(key):
        listing.counts["files_given_twice"] += file.is_held_out == other.is_held_out
        name = min(file.name, other.name, key=lambda label: (-label.count("/"), label))
        file = Listed(
            name,
            file.path,
            is_given=file.is_given or other.is_given,
            is_held_out=file.is_held_out or other.is_held_out,
        )
    listing.files[key] = file
