"""The form of a file, known by its name, and its unpacked bytes, or those of an archive's members one after the other.

Nothing is ever extracted to disk. A member's name is only a label, never a path that is opened. Reading a damaged file
raises the libraries' own errors (`DAMAGE`).
"""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from cuadrilla.errors import EnvironmentProblem
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

CHUNK_BYTES = 2**20
ACCEPTED = Message("text as .txt, .md, .jsonl, .parquet or TEI .xml, also packed (.gz, .zst, .xz, .bz2), .zip or .tar")
DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError),
    *(NotImplementedError, RuntimeError, OverflowError, IndexError, MemoryError),
)
PARQUET, TAR, ZIP = ".parquet", ".tar", ".zip"
_CONTENTS = {name: name for name in (".txt", ".md", ".jsonl", ".xml", PARQUET, TAR, ZIP)} | {".ndjson": ".jsonl"}
_SHORT = {".tgz": ".tar.gz", ".tzst": ".tar.zst", ".txz": ".tar.xz", ".tbz2": ".tar.bz2"}


def missing(package: str, *, suffix: str) -> EnvironmentProblem:
    hint = 'pip install "cuadrilla[data]"'
    text = "reading {suffix} needs {package}, which is not installed"
    return EnvironmentProblem(text, suffix=suffix, package=package, hint=hint)


def _open_zstandard(path: Path) -> IO[bytes]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing("pyarrow", suffix=".zst") from error
    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), CHUNK_BYTES)


OPENERS: dict[str, Callable[[Path], Any]] = {
    "": partial(open, mode="rb"),
    ".gz": gzip.open,
    ".zst": _open_zstandard,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
"""How to open each packing. All streams of a file are read if there are several, as after `cat a.gz b.gz`."""


class Form(NamedTuple):
    content: str
    packing: str = ""
    """A key of `OPENERS`."""


def form_of(name: str) -> Form | None:
    """The form of a file named `name`, or None if such files are not read."""
    path = PurePosixPath(name.lower())
    path = path.with_suffix(_SHORT.get(path.suffix, path.suffix))
    packing = path.suffix if path.suffix in OPENERS else ""
    content = _CONTENTS.get(path.with_suffix("").suffix if packing else path.suffix)
    return None if content is None or (packing and content in (PARQUET, ZIP)) else Form(content, packing)


def streams(path: Path, form: Form) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, stream) of every file in an archive, in its order; links and devices are skipped. A file that is not an
    archive gives ("", stream).

    A stream must be read before the next one is asked for, or not at all.
    """
    if form.content == ZIP:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG):
                    with archive.open(entry) as member:
                        yield one_line(entry.filename), member
        return
    with OPENERS[form.packing](path) as file:
        if form.content != TAR:
            yield "", file
            return
        with tarfile.open(fileobj=file, mode="r|", errors="replace") as tar:
            while info := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]
                if info.isreg() and (content := tar.extractfile(info)):
                    yield one_line(info.name), content
        while file.read(CHUNK_BYTES):  # a packed tar may be damaged after its last member
            pass
