"""Files by their hash in this machine's cache: a content is there once, whichever runs have it, and is fetched once.

A run's folder has names of its own for them (hard links). A download that broke goes on where it stopped.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from cuadrilla.home import Home
from cuadrilla.link.base import OfferedFile, Refused
from cuadrilla.link.client import Connection
from cuadrilla.messages import Message
from cuadrilla.rundir import file_sha256, make_private, storage_errors

TELL_SECONDS = 10.0

Report = Callable[[str], None]


def bring(
    connection: Connection,
    files: Sequence[OfferedFile],
    folder: Path,
    *,
    home: Home,
    report: Report,
    here: Mapping[str, Path],
) -> None:
    """Have these files in `folder`. `here`: those that are not fetched, since this machine has them at these paths.

    Raises LinkError, Refused, ResourceError.
    """
    wanted = {folder / file.path: file for file in files if not _is(folder / file.path, file)}
    if not wanted:
        return
    contents, missing = home.cache / "contents", dict[Path, OfferedFile]()
    for private in (home.path, home.cache, contents):
        make_private(private)
    with FileLock(home.cache / "lock"):  # several processes of this machine may want the same
        for file in wanted.values():
            content = contents / file.sha256.hex()
            if not _is(content, file) and file.path in here:
                _link(_same(here[file.path], file), content)
            elif not _is(content, file):
                missing[content] = file
        _fetch(connection, missing, report=report)
        for path, file in wanted.items():
            _link(contents / file.sha256.hex(), path)


def _fetch(connection: Connection, missing: Mapping[Path, OfferedFile], *, report: Report) -> None:
    """Say now and then how much has come. Raises LinkError, ResourceError."""
    if not missing:
        return
    total, come, told_at = sum(file.num_bytes for file in missing.values()), 0, time.monotonic()
    template = (
        "fetching {number} files ({megabytes:.1f} MB)" if len(missing) > 1 else "fetching a file ({megabytes:.1f} MB)"
    )
    report(Message(template, number=len(missing), megabytes=total / 1e6))

    def arrived(num_bytes: int) -> None:
        nonlocal come, told_at
        come += num_bytes
        if time.monotonic() - told_at > TELL_SECONDS:
            told_at = time.monotonic()
            report(Message("fetched {come:.1f} of {megabytes:.1f} MB", come=come / 1e6, megabytes=total / 1e6))

    for content, file in missing.items():
        connection.fetch(file, to=content, arrived=arrived)


def _is(path: Path, file: OfferedFile) -> bool:
    return path.is_file() and path.stat().st_size == file.num_bytes and bytes.fromhex(file_sha256(path)) == file.sha256


def _same(path: Path, file: OfferedFile) -> Path:
    """A file of this machine. Raises Refused when it is not the one of the run."""
    if _is(path, file):
        return path
    problem = "{path} is not the data that the run uses" if path.is_file() else "{path} does not exist"
    raise Refused(problem, path=path, hint="join without --data: what is missing is fetched from the coordinator")


def _link(path: Path, name: Path) -> None:
    """Give a file a second name, in the cache. Raises ResourceError."""
    with storage_errors(name):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        try:
            os.link(path, name)
        except OSError:  # another file system
            name.symlink_to(path.resolve())
